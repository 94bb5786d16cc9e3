"""Vectors of texts in the shapes that the clients of other servers expect.

    POST /embed             Text Embeddings Inference: inputs -> a list of vectors
    POST /embedding         llama.cpp: content -> a list of documents, each with a list of vectors
    POST /api/embed         Ollama: input -> embeddings with counts; texts that are too long are cut
    POST /api/embeddings    Ollama, before that: prompt -> one embedding, not of length one

They are the vectors of /v1/embeddings, which says how they are made.
"""

import time

import msgspec

from cairn.serve.http.endpoints.embeddings import EmbeddingRequest, embedded
from cairn.serve.http.endpoints.ollama_models import served_name
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON
from cairn.serve.http.protocol.sampling import AtLeastOne
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

WHOLE = -1  # cut to what the model reads


class EmbedRequest(msgspec.Struct, kw_only=True):
    """POST /embed"""

    inputs: str | list[str | int | list[int]]
    truncate: bool | None = None  # not by default
    normalize: bool = True
    prompt_name: str | None = None
    dimensions: AtLeastOne | None = None


class LlamaEmbedding(msgspec.Struct, kw_only=True):
    """POST /embedding"""

    content: str | list[str | int | list[int]]
    model: str | None = None


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """POST /api/embed"""

    model: str
    input: str | list[str]
    truncate: bool = True
    dimensions: AtLeastOne | None = None


class OllamaEmbedding(msgspec.Struct, kw_only=True):
    """POST /api/embeddings"""

    model: str
    prompt: str


async def embed(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, EmbedRequest)
    request = EmbeddingRequest(
        input=payload.inputs,
        dimensions=payload.dimensions,
        normalize=payload.normalize,
        prompt_name=payload.prompt_name,
        truncate_prompt_tokens=WHOLE if payload.truncate else None,
    )
    return JSON((await embedded(service, call, request)).vectors_BD.tolist())


async def embedding(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, LlamaEmbedding)
    request = EmbeddingRequest(input=payload.content, model=payload.model)
    vectors_BD = (await embedded(service, call, request)).vectors_BD
    return JSON([{"index": at, "embedding": [one]} for at, one in enumerate(vectors_BD.tolist())])


async def api_embed(service: Service, call: Call, body: bytes) -> JSON:
    began, payload = time.monotonic_ns(), decode(body, OllamaEmbed)
    request = EmbeddingRequest(
        input=[payload.input] if isinstance(payload.input, str) else [*payload.input],
        model=served_name(service, payload.model),
        dimensions=payload.dimensions,
        normalize=True,
        truncate_prompt_tokens=WHOLE if payload.truncate else None,
    )
    embeddings = await embedded(service, call, request)
    return JSON(
        {
            "model": payload.model,
            "embeddings": embeddings.vectors_BD.tolist(),
            "total_duration": time.monotonic_ns() - began,
            "load_duration": 0,
            "prompt_eval_count": embeddings.tokens,
        }
    )


async def api_embeddings(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, OllamaEmbedding)
    request = EmbeddingRequest(
        input=payload.prompt,
        model=served_name(service, payload.model),
        normalize=False,
        truncate_prompt_tokens=WHOLE,
    )
    embeddings = await embedded(service, call, request)
    return JSON({"embedding": embeddings.vectors_BD[0].tolist()})
