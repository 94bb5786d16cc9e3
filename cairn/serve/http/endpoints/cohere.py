"""POST /v2/embed and /v2/rerank as Cohere's client asks: vectors in several number types, documents by relevance.

    float    as /v1/embeddings                    base64    the same as float32, least byte first
    int8     -127..127, the largest is 127        uint8     the same plus 128
    ubinary  a bit for each sign, eight a byte    binary    the same minus 128

`input_type` chooses among the model's own prompts. Cohere says that int8 lies between -128 and 127 and not how it is
made: here each vector is scaled by its largest component, so cosines stay and lengths do not. Pictures are refused.
Documents to rank are cut to what the model reads; `max_tokens_per_doc`, a smaller limit, is not followed.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from cairn.models.encoder.pooling_rules import PoolingRules
from cairn.serve.http.endpoints.embed import WHOLE
from cairn.serve.http.endpoints.embeddings import EmbeddingRequest, embedded, encoded
from cairn.serve.http.endpoints.rerank import RerankRequest, reranked
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.sampling import AtLeastOne, Priority
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
FLOAT: list[EmbeddingType] = ["float"]
Truncate = Literal["NONE", "START", "END"]
# What the files of models call the prompts of each kind, the most usual name first.
PROMPTS = {
    "search_query": ("query", "search_query", "retrieval.query"),
    "search_document": ("document", "passage", "search_document", "retrieval.passage"),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering", "separation"),
}


class CohereContent(msgspec.Struct, kw_only=True):
    type: str
    text: str | None = None


class CohereInput(msgspec.Struct, kw_only=True):
    content: list[CohereContent]


class CohereEmbedRequest(msgspec.Struct, kw_only=True):
    """POST /v2/embed"""

    model: str | None = None
    input_type: InputType | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None  # in place of texts
    images: list[str] | None = None
    embedding_types: list[EmbeddingType] | None = None  # float by default
    output_dimension: AtLeastOne | None = None
    max_tokens: AtLeastOne | None = None  # of a text
    truncate: Truncate | None = None  # END
    priority: Priority | None = None


async def cohere_embed(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, CohereEmbedRequest)
    texts = _texts(payload)
    types = list(dict.fromkeys(payload.embedding_types or FLOAT))
    _check_width(types, payload.output_dimension, service.serving.vectors.width)
    request = EmbeddingRequest(
        input=[*texts],
        model=payload.model,
        dimensions=payload.output_dimension,
        normalize=True,
        prompt_name=prompt_name(service.serving.vectors.rules, payload.input_type),
        truncate_prompt_tokens=_most_tokens(payload, service.serving.limits.longest_text),
        truncation_side="left" if payload.truncate == "START" else "right",
        priority=payload.priority,
    )
    embeddings = await embedded(service, call, request)
    return JSON(
        {
            "id": call.id,
            "embeddings": {kind: MADE_AS[kind](embeddings.vectors_BD) for kind in types},
            "texts": texts,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"input_tokens": embeddings.tokens},
            },
            "response_type": "embeddings_by_type",
        }
    )


async def cohere_rerank(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, RerankRequest)
    if payload.truncate_prompt_tokens is None:
        payload.truncate_prompt_tokens = WHOLE
    return await reranked(service, call, payload)


class CohereError(msgspec.Struct, kw_only=True):
    message: str


def cohere_error(refusal: Refusal) -> JSON:
    return JSON({"message": refusal.message}, refusal.status, refusal.headers())


def prompt_name(rules: PoolingRules, kind: InputType | None) -> str | None:
    """The model's prompt for a kind of input; None: it has none, and its default holds."""
    names = PROMPTS.get(kind or "", ())
    return next((name for name in names if name in rules.prompts), None)


def _texts(payload: CohereEmbedRequest) -> list[str]:
    if payload.images or payload.input_type == "image":
        raise Refusal(
            400, "images are not embedded; give texts", param="images", code="unsupported"
        )
    if (payload.texts is None) == (payload.inputs is None):
        message = "texts and inputs are given" if payload.texts is not None else "texts is missing"
        raise Refusal(400, f"{message}; give one of texts and inputs", param="texts")
    if payload.texts is not None:
        texts = payload.texts
    else:
        texts = [_text(one, at) for at, one in enumerate(payload.inputs or ())]
    if not texts:
        raise Refusal(400, "texts is an empty list", param="texts")
    return texts


def _text(value: CohereInput, at: int) -> str:
    """The text of an input with exactly one text part."""
    kinds = [part.type for part in value.content]
    if kinds != ["text"] or value.content[0].text is None:
        message = f"inputs[{at}].content has {', '.join(kinds) or 'nothing'}; it has to be one text"
        raise Refusal(400, message, param="inputs")
    return value.content[0].text


def _most_tokens(payload: CohereEmbedRequest, longest: int) -> int | None:
    if payload.truncate != "NONE":
        return WHOLE if payload.max_tokens is None else min(payload.max_tokens, longest)
    if payload.max_tokens is not None:
        message = "max_tokens cuts texts, and truncate is NONE; leave one of them out"
        raise Refusal(400, message, param="max_tokens")
    return None


def _check_width(types: list[EmbeddingType], dimensions: int | None, width: int) -> None:
    if dimensions is not None and dimensions > width:
        message = f"output_dimension is {dimensions}; it has to be between 1 and {width}"
        raise Refusal(400, message, param="output_dimension")
    packed = [kind for kind in types if kind in ("binary", "ubinary")]
    if packed and (dimensions or width) % 8:
        message = (
            f"{packed[0]} packs 8 dimensions into a byte, and vectors have {dimensions or width}"
        )
        hint = "use an output_dimension that 8 divides"
        raise Refusal(400, f"{message}; {hint}", param="embedding_types")


# -- number types -----------------------------------------------------------------------------------


def int8(vectors_BD: np.ndarray) -> np.ndarray:
    largest_B1 = np.abs(vectors_BD).max(-1, keepdims=True)
    return np.rint(127 * (vectors_BD / np.where(largest_B1 > 0, largest_B1, 1))).astype(np.int8)


def bits(vectors_BD: np.ndarray) -> np.ndarray:
    """The first dimension is the highest bit of the first byte."""
    return np.packbits(vectors_BD >= 0, axis=-1)


MADE_AS: dict[str, Callable[[np.ndarray], list]] = {
    "float": lambda vectors_BD: vectors_BD.tolist(),
    "base64": lambda vectors_BD: [encoded(vector_D) for vector_D in vectors_BD],
    "int8": lambda vectors_BD: int8(vectors_BD).tolist(),
    "uint8": lambda vectors_BD: (int8(vectors_BD).astype(np.int16) + 128).tolist(),
    "ubinary": lambda vectors_BD: bits(vectors_BD).tolist(),
    "binary": lambda vectors_BD: (bits(vectors_BD).astype(np.int16) - 128).tolist(),
}
