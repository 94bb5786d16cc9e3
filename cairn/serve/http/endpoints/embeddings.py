"""POST /v1/embeddings: a vector of length one for each input, from the hidden states of the model that is served.

    input -prompts-> requests that are pooled -exchange-> a vector each -cut, normalised-> float | base64

The engine computes them among everything else that it runs (`engine/pooling`), so that the line, the deadlines, the
limits of keys and a client that leaves are what they are for an answer. A model that was made to chat gives vectors
that can be compared; one that was trained for it gives better ones.
"""

import base64
from typing import Literal

import msgspec
import numpy as np

from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.endpoints.prompt_inputs import read_inputs
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.sampling import AtLeastOne, Priority
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.serving import GenerateRequest

MOST_INPUTS = 2048  # OpenAI's limit


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings"""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: AtLeastOne | None = None  # the first so many, normalised again
    pooling: Literal["mean", "last"] | None = None  # over all tokens, or of the last one
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


async def embeddings(service: Service, call: Call, body: bytes) -> JSON:
    asked = decode(body, EmbeddingRequest)
    model = service.check_model(asked.model)
    _check(service, asked)
    rules = service.admission.rules
    most = min(MOST_INPUTS, rules.rows + rules.waiting)
    special = asked.add_special_tokens is not False
    prompts = await read_inputs(service, asked.input, "input", most, special)
    params = SamplingParams(
        max_tokens=1, temperature=0, ignore_eos=True, pooling=asked.pooling or "mean"
    )
    priority = asked.priority or 0
    requests = [GenerateRequest(prompt.token_ids, params, priority) for prompt in prompts]
    async with Exchange(service, call, requests, model) as exchange:
        await exchange.finish()
        return JSON(_answer(asked, model, exchange))


def _check(service: Service, asked: EmbeddingRequest) -> None:
    width = service.serving.opened.spec.hidden
    if asked.dimensions is not None and asked.dimensions > width:
        said = f"dimensions is {asked.dimensions}; it has to be between 1 and {width}"
        raise Refusal(400, said, param="dimensions")


def _answer(asked: EmbeddingRequest, model: str, exchange: Exchange) -> EmbeddingList:
    data, tokens = [], 0
    for job in exchange.jobs:
        if job.pooled is None:  # it was ended before it was computed
            raise Refusal(503, "the request was ended before all of its inputs were computed",
                          code="timeout", retry_after_s=1)  # fmt: skip
        vector_D = unit(np.frombuffer(job.pooled, dtype=np.float32), asked.dimensions)
        spelled = encoded(vector_D) if asked.encoding_format == "base64" else vector_D.tolist()
        data.append(Embedding(index=job.answer.index, embedding=spelled))
        tokens += len(job.request.prompt)
    usage = EmbeddingUsage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList(model=model, data=data, usage=usage)


def unit(vector_D: np.ndarray, dimensions: int | None = None) -> np.ndarray:
    """The first `dimensions` of a vector, at length one; zeros stay what they are."""
    part_D = vector_D[:dimensions].astype(np.float64)  # squares of float32 may leave its range
    length = float(np.sqrt(part_D @ part_D))
    return (part_D / length if length > 0 else part_D).astype("<f4")


def encoded(vector_D: np.ndarray) -> str:
    return base64.b64encode(vector_D.tobytes()).decode("ascii")
