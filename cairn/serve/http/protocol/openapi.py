"""The OpenAPI document, made from the Structs that check the bodies: what it says is what is enforced."""

import functools
import re
from typing import Any

import msgspec

from cairn import __version__
from cairn.serve.http.endpoints.adapters import LoadAdapterRequest, UnloadAdapterRequest
from cairn.serve.http.endpoints.cohere import CohereEmbedRequest, CohereError
from cairn.serve.http.endpoints.embed import (
    EmbedRequest,
    LlamaEmbedding,
    OllamaEmbed,
    OllamaEmbedding,
)
from cairn.serve.http.endpoints.embeddings import EmbeddingList, EmbeddingRequest
from cairn.serve.http.endpoints.llamacpp import InfillRequest, LlamaRequest
from cairn.serve.http.endpoints.ollama import OllamaChat, OllamaGenerate
from cairn.serve.http.endpoints.ollama_models import OllamaShow
from cairn.serve.http.endpoints.rerank import (
    ClassificationList,
    ClassifyRequest,
    RankedText,
    RerankList,
    RerankRequest,
    ScoreList,
    ScoreRequest,
)
from cairn.serve.http.endpoints.role import RoleRequest
from cairn.serve.http.endpoints.sleep import SleepState
from cairn.serve.http.endpoints.weights import PauseRequest, UpdateRequest
from cairn.serve.http.ledger.views import (
    EngineView,
    ModelView,
    RequestList,
    RequestView,
    TraceView,
    UsageView,
)
from cairn.serve.http.protocol.answers import (
    ChatCompletion,
    Completion,
    Detokenized,
    Health,
    InputTokens,
    ModelCard,
    ModelList,
    Tokenized,
    Version,
)
from cairn.serve.http.protocol.batches import Batch, BatchList, BatchRequest, FileList, FileObject
from cairn.serve.http.protocol.messages import (
    AnthropicError,
    AnthropicMessage,
    Counted,
    CountRequest,
    MessagesRequest,
)
from cairn.serve.http.protocol.refusal import ErrorBody
from cairn.serve.http.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from cairn.serve.http.protocol.responses import ItemList, ModelResponse, ResponsesRequest
from cairn.serve.http.protocol.transcripts import FORMATS

RANKED = RerankList | list[RankedText]  # a list for `texts`, as Text Embeddings Inference has it
POSTS: dict[str, tuple[type, Any, str]] = {
    "/v1/chat/completions": (ChatRequest, ChatCompletion, "the next message of a conversation"),
    "/v1/completions": (CompletionRequest, Completion, "the continuation of a text"),
    "/v1/embeddings": (EmbeddingRequest, EmbeddingList, "vectors of texts"),
    "/v1/rerank": (RerankRequest, RANKED, "documents, the best answer to a query first"),
    "/v2/rerank": (RerankRequest, RANKED, "as /v1/rerank, Cohere's way"),
    "/rerank": (RerankRequest, RANKED, "as /v1/rerank"),
    "/score": (ScoreRequest, ScoreList, "how well texts of pairs belong together"),
    "/v1/score": (ScoreRequest, ScoreList, "as /score"),
    "/classify": (ClassifyRequest, ClassificationList, "labels of texts"),
    "/v1/messages": (MessagesRequest, AnthropicMessage, "the next message, Anthropic's way"),
    "/v1/messages/count_tokens": (CountRequest, Counted, "how long a conversation is"),
    "/v1/responses": (ResponsesRequest, ModelResponse, "the answer to an input"),
    "/v1/chat/completions/input_tokens": (ChatRequest, InputTokens, "how long a chat's prompt is"),
    "/v1/responses/input_tokens": (ResponsesRequest, InputTokens, "how long an input is"),
    "/v1/batches": (BatchRequest, Batch, "many requests, answered when there is room"),
    "/tokenize": (TokenizeRequest, Tokenized, "the token ids of a text or a conversation"),
    "/detokenize": (DetokenizeRequest, Detokenized, "the text of token ids"),
}
GETS: dict[str, tuple[type, str]] = {
    "/v1/models": (ModelList, "the model, under each of its names"),
    "/v1/models/{name}": (ModelCard, "the model under one name"),
    "/v1/responses/{id}": (ModelResponse, "a response that is kept"),
    "/v1/responses/{id}/input_items": (ItemList, "what it was asked with"),
    "/v1/files": (FileList, "the files that were uploaded or made"),
    "/v1/files/{id}": (FileObject, "one file"),
    "/v1/batches": (BatchList, "the batches that were asked for"),
    "/v1/batches/{id}": (Batch, "how far a batch has come"),
    "/health": (Health, "whether the engine makes progress"),
    "/live": (Health, "whether the server may still get well by itself"),
    "/version": (Version, "the version of Cairn"),
    "/is_sleeping": (SleepState, "whether its memory was given back; with --admin-endpoints"),
    "/cairn/engine": (EngineView, "what the engine is doing now"),
    "/cairn/usage": (UsageView, "tokens, device-seconds and joules of each API key"),
    "/cairn/requests": (RequestList, "where the time of the last requests went"),
    "/cairn/requests/{id}": (RequestView, "where the time of one request went"),
    "/cairn/requests/{id}/trace": (TraceView, "one request as a timeline for Perfetto"),
    "/cairn/trace": (TraceView, "the last requests as a timeline for Perfetto"),
    "/cairn/model": (ModelView, "the model card"),
}
# Paths of other servers' clients, of administrators and of decode servers: answers are described by whose they are.
OTHER_POSTS: dict[str, tuple[type | None, str]] = {
    "/completion": (LlamaRequest, "the continuation of a text, llama.cpp's way"),
    "/infill": (InfillRequest, "the text between two others, llama.cpp's way"),
    "/apply-template": (TokenizeRequest, "a conversation as text, llama.cpp's way"),
    "/api/chat": (OllamaChat, "the next message of a conversation, Ollama's way"),
    "/api/generate": (OllamaGenerate, "the continuation of a text, Ollama's way"),
    "/embedding": (LlamaEmbedding, "vectors of texts, llama.cpp's way"),
    "/embed": (EmbedRequest, "vectors of texts, Text Embeddings Inference's way"),
    "/v2/embed": (CohereEmbedRequest, "vectors of texts, Cohere's way"),
    "/api/embed": (OllamaEmbed, "vectors of texts, Ollama's way"),
    "/api/embeddings": (OllamaEmbedding, "the vector of a text, Ollama's way"),
    "/api/show": (OllamaShow, "the model, Ollama's way"),
    "/v1/load_lora_adapter": (LoadAdapterRequest, "serve an adapter; with --admin-endpoints"),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, "serve it no more; with --admin-endpoints"),
    "/pause": (PauseRequest, "take no step until /resume; with --admin-endpoints"),
    "/resume": (None, "go on after /pause; with --admin-endpoints"),
    "/sleep": (None, "give the memory back until a request or /wake_up; with --admin-endpoints"),
    "/wake_up": (None, "go on after /sleep; with --admin-endpoints"),
    "/update_weights": (UpdateRequest, "serve with other weights; with --admin-endpoints"),
    "/reset_prefix_cache": (None, "find no earlier prompt again; with --admin-endpoints"),
    "/cairn/role": (RoleRequest, "prefill, decode or both; with --admin-endpoints"),
    "/cairn/prefill": (
        None,
        "compute a prompt for a decode server, in MessagePack; with --role prefill",
    ),
}
OTHER_GETS: dict[str, tuple[str, str]] = {
    "/props": ("application/json", "the server, llama.cpp's way"),
    "/load": ("application/json", "how many requests are inside, vLLM's way"),
    "/slots": ("application/json", "rows of the batch, llama.cpp's way"),
    "/api/ps": ("application/json", "the models that are loaded, Ollama's way"),
    "/api/tags": ("application/json", "the models, Ollama's way"),
    "/api/version": ("application/json", "the version, Ollama's way"),
    "/cairn/engine/events": ("text/event-stream", "what the engine is doing, as it changes"),
    "/cairn/pulse": ("application/x-cairn-pulse", "what is cached and how busy it is, to a router"),
}
PAGE = {
    "limit": {"type": "integer", "minimum": 1, "maximum": 10_000, "default": 100},
    "after": {"type": "string"},
}
QUERIES: dict[str, dict[str, dict[str, Any]]] = {
    "/cairn/requests": {
        "order": {"enum": ["newest", "slowest"], "default": "newest"},
        "limit": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100},
    },
    "/v1/responses/{id}/input_items": {
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
        "after": {"type": "string"},
        "order": {"enum": ["asc", "desc"], "default": "desc"},
    },
    "/v1/files": PAGE,
    "/v1/batches": PAGE,
    "/sleep": {
        "level": {"type": "integer", "minimum": 1, "maximum": 2, "default": 1},
        "mode": {"enum": ["refuse", "abort"], "default": "refuse"},
    },
    "/cairn/trace": {
        "seconds": {"type": "number", "minimum": 0.001, "maximum": 3600, "default": 30}
    },
}
ANY: dict[str, Any] = {}  # a document of any form
SOUND: dict[str, Any] = {
    "type": "object",
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "temperature": {"type": "number", "minimum": 0, "maximum": 1},
        "response_format": {"enum": list(FORMATS)},
    },
    "required": ["file"],
}
ERRORS: dict[str, type] = {"/v1/messages": AnthropicError, "/v2/": CohereError}
STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
MISTAKES = {
    400: "a field is wrong; `param` is its name",
    401: "no API key, or an unknown one",
    403: "not with this key",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "the body is too large",
    429: "too many requests; Retry-After says when to come again",
    503: "the deadline cannot be met, the server is stopping, or the engine is down",
}


@functools.cache
def document() -> dict[str, Any]:
    kinds: set[Any] = {ErrorBody, *ERRORS.values()}
    for body, answered, _ in POSTS.values():
        kinds |= {body, answered}
    kinds |= {answered for answered, _ in GETS.values()}
    kinds |= {body for body, _ in OTHER_POSTS.values() if body is not None}
    order = sorted(kinds, key=lambda kind: getattr(kind, "__name__", str(kind)))
    references, components = msgspec.json.schema_components(
        order, ref_template="#/components/schemas/{name}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cairn", "version": __version__},
        "paths": _paths(dict(zip(order, references, strict=True))),
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _paths(named: dict[Any, Any]) -> dict[str, Any]:
    """Every path with its operations; `named`: a reference to the schema of each Struct."""
    paths: dict[str, Any] = {}
    for path, (body, answered, about) in POSTS.items():
        error = next((kind for begin, kind in ERRORS.items() if path.startswith(begin)), ErrorBody)
        operation = _operation(about, named[answered], named[error], [*MISTAKES])
        operation["requestBody"] = {"required": True, "content": _json(named[body])}
        if path in STREAMS:
            operation["responses"]["200"]["content"]["text/event-stream"] = {}
        paths[path] = {"post": operation}
    for path, (answered, about) in GETS.items():
        mistakes = [400, 401, 404, 503] if path in QUERIES else [401, 403, 404, 503]
        operation = _operation(about, named[answered], named[ErrorBody], mistakes)
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in re.findall(r"{(\w+)}", path)
        ] + _query(path)
        paths.setdefault(path, {})["get"] = operation
    _add_files(paths, named[FileObject], named[Batch], named[ErrorBody])
    _add_others(paths, named)
    return paths


def _add_others(paths: dict[str, Any], named: dict[type, Any]) -> None:
    """Paths whose answers have no schema here."""
    for path, (body, about) in OTHER_POSTS.items():
        operation = _operation(about, ANY, ANY, [*MISTAKES])
        operation["parameters"] = _query(path)
        if body is not None:
            operation["requestBody"] = {"required": True, "content": _json(named[body])}
        operation["responses"]["200"]["content"] = {"*/*": {}}
        paths[path] = {"post": operation}
    for path, (media, about) in OTHER_GETS.items():
        operation = _operation(about, ANY, named[ErrorBody], [401, 404, 503])
        operation["responses"]["200"]["content"] = {media: {}}
        paths[path] = {"get": operation}
    text = {
        "description": "Prometheus text",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
    paths["/metrics"] = {"get": {"summary": "counts and times", "responses": {"200": text}}}


def _add_files(paths: dict[str, Any], file: Any, batch: Any, error: Any) -> None:
    """Add operations with bodies other than JSON."""
    form = {
        "type": "object",
        "properties": {
            "file": {"type": "string", "contentMediaType": "application/octet-stream"},
            "purpose": {"const": "batch"},
        },
        "required": ["file", "purpose"],
    }
    upload = _operation("a file for a batch", file, error, [400, 401, 404, 408, 413, 429])
    upload["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    paths["/v1/files"]["post"] = upload
    for task in ("transcriptions", "translations"):
        heard = _operation(f"speech as text: {task}", ANY, error, [*MISTAKES])
        heard["requestBody"] = {
            "required": True,
            "content": {"multipart/form-data": {"schema": SOUND}},
        }
        heard["responses"]["200"]["content"] = {"*/*": {}}
        paths[f"/v1/audio/{task}"] = {"post": heard}
    id = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
    cancel = _operation(
        "the batch ends soon, with what it has", batch, error, [401, 404, 408, 413, 429]
    )
    paths["/v1/batches/{id}/cancel"] = {"post": cancel | {"parameters": [id]}}
    content = _operation("what is in a file", {}, error, [401, 404])
    content["responses"]["200"]["content"] = {"application/octet-stream": {}}
    paths["/v1/files/{id}/content"] = {"get": content | {"parameters": [id]}}
    for kind, mistakes in (("files", [400, 401, 404]), ("responses", [401, 404])):
        gone = _operation(f"one of {kind} is kept no more", ANY, error, mistakes)
        paths[f"/v1/{kind}/{{id}}"]["delete"] = gone | {"parameters": [id]}


def _query(path: str) -> list[dict[str, Any]]:
    """Query parameters of a path."""
    fields = QUERIES.get(path, {}).items()
    return [{"name": name, "in": "query", "schema": schema} for name, schema in fields]


def _operation(about: str, answer: Any, error: Any, mistakes: list[int]) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": about, "content": _json(answer)}}
    for status in mistakes:
        responses[str(status)] = {"description": MISTAKES[status], "content": _json(error)}
    return {"summary": about, "responses": responses}


def _json(schema: Any) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
