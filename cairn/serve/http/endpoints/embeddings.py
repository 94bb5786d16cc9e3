"""POST /v1/embeddings: a vector for each input, from the hidden states of the model that is served.

    input -tokens-> requests that are pooled -exchange-> a vector each -projected, cut, normalised-> float | base64

How states are pooled, which text goes before an input and whether vectors have length one is what the files beside the
model say (`models/encoder/pooling_rules`); a request may say otherwise. The engine computes them among everything else
that it runs, so admission, deadlines, keys and a client that leaves are as for an answer.
"""

import asyncio
import base64
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cairn.models.encoder.texts import Side, TextIds, encode_texts
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.endpoints.prompt_inputs import FEW, read_inputs
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.sampling import AtLeastOne, Priority
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import LONG_TEXT, Service
from cairn.serve.serving import GenerateRequest
from cairn.serve.text_vectors import matrix_of

MOST_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings"""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None  # the first so many, normalised again
    pooling: Literal["mean", "last", "cls", "max"] | None = None  # None: as the model's files say
    normalize: bool | None = None  # to length one; None: as the model's files say
    prompt_name: str | None = None  # of the model's own prompts, such as "query"
    # Cut texts to so many tokens; -1: what the model reads.
    truncate_prompt_tokens: int | None = None
    truncation_side: Side | None = None  # right; left: the last tokens stay
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    user: str | None = None


class Embedding(msgspec.Struct, kw_only=True):
    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | str  # text: the base64 of float32, least byte first


class EmbeddingUsage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    model: str
    data: list[Embedding]
    usage: EmbeddingUsage


class Embedded(NamedTuple):
    vectors_BD: np.ndarray
    tokens: int
    model: str


async def embeddings(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, EmbeddingRequest)
    computed = await embedded(service, call, payload)
    as_text = payload.encoding_format == "base64"
    data = [
        Embedding(index=at, embedding=encoded(vector_D) if as_text else vector_D.tolist())
        for at, vector_D in enumerate(computed.vectors_BD)
    ]
    usage = EmbeddingUsage(prompt_tokens=computed.tokens, total_tokens=computed.tokens)
    return JSON(EmbeddingList(model=computed.model, data=data, usage=usage))


async def embedded(service: Service, call: Call, payload: EmbeddingRequest) -> Embedded:
    model = service.check_model(payload.model)
    vectors = service.serving.vectors
    if payload.dimensions is not None and payload.dimensions > vectors.width:
        message = f"dimensions is {payload.dimensions}; it has to be between 1 and {vectors.width}"
        raise Refusal(400, message, param="dimensions")
    texts = await _read(service, payload)
    pooling = payload.pooling or vectors.rules.pooling
    pooled_BD, tokens = await pool(service, call, texts, pooling, model, payload.priority or 0)
    return Embedded(
        vectors.embeddings(pooled_BD, payload.dimensions, payload.normalize), tokens, model
    )


async def pool(
    service: Service,
    call: Call,
    texts: Sequence[TextIds],
    pooling: str,
    model: str,
    priority: int = 0,
) -> tuple[np.ndarray, int]:
    """Embeddings [B, D] of the texts, and their number of tokens."""
    params = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, pooling=pooling)
    requests = [GenerateRequest(text.ids, params, priority, segment=text.segment) for text in texts]
    async with Exchange(service, call, requests, model) as exchange:
        await exchange.finish()
        vectors = [job.pooled for job in exchange.jobs]
    whole = [one for one in vectors if one is not None]
    if len(whole) < len(vectors):  # it was ended before it was computed
        raise Refusal(
            503,
            "the request was ended before all of its inputs were computed",
            code="timeout",
            retry_after_s=1,
        )
    return matrix_of(whole), sum(len(text.ids) for text in texts)


def longest_text(service: Service, limit: int | None) -> int | None:
    """Maximum tokens to truncate a text to; None to reject texts that are too long."""
    if limit is None:
        return None
    context = service.serving.limits.longest_text
    if limit != -1 and not 1 <= limit <= context:
        message = f"truncate_prompt_tokens is {limit}; it has to be -1 or between 1 and {context}"
        raise Refusal(400, message, param="truncate_prompt_tokens")
    return context if limit == -1 else limit


def most_inputs(service: Service) -> int:
    rules = service.admission.rules
    return min(MOST_INPUTS, rules.rows + rules.waiting)


async def _read(service: Service, payload: EmbeddingRequest) -> list[TextIds]:
    """Texts behind their prompt, or token ids as they are."""
    special = payload.add_special_tokens is not False
    most, limit = longest_text(service, payload.truncate_prompt_tokens), most_inputs(service)
    prompt = service.serving.vectors.rules.prompt(payload.prompt_name)
    inputs = [payload.input] if isinstance(payload.input, str) else payload.input
    texts = [one for one in inputs if isinstance(one, str)]
    if not inputs or len(texts) < len(inputs):
        cuts = most is not None
        prompts = await read_inputs(
            service, payload.input, "input", limit, special, any_length=cuts
        )
        side = payload.truncation_side or "right"
        return [TextIds(_cut(one.token_ids, most, side)) for one in prompts]
    return await encode_all(
        service,
        [prompt + text for text in texts],
        "input",
        most,
        limit,
        special,
        payload.truncation_side or "right",
    )


def _cut(ids: list[int], most: int | None, side: Side) -> list[int]:
    """Ids that were sent as such, of which none counts as special."""
    if most is None:
        return ids
    return ids[:most] if side == "right" else ids[-most:]


async def encode_all(
    service: Service,
    texts: list[str],
    field: str,
    most: int | None,
    limit: int,
    special: bool = True,
    side: Side = "right",
) -> list[TextIds]:
    """Many texts, or long ones, are tokenized beside the event loop."""
    if len(texts) > limit:
        message = f"{field} holds {len(texts)} entries; at most {limit} fit into one request"
        raise Refusal(400, message, param=field)
    if most is None:
        for text in texts:
            service.check_length(text, field)
    tokenizer = service.tokenizer
    if len(texts) <= FEW and sum(map(len, texts)) <= LONG_TEXT:
        return encode_texts(tokenizer, texts, most, special, side)
    return await asyncio.to_thread(encode_texts, tokenizer, texts, most, special, side)


def encoded(vector_D: np.ndarray) -> str:
    return base64.b64encode(vector_D.tobytes()).decode("ascii")
