"""Every path of the server: which endpoint answers it, who may call it, and in whose form its errors are.

Data only: `api` makes an application of it.
"""

from collections.abc import Awaitable, Callable

from starlette.responses import Response

from cairn.serve.http.endpoints.about import (
    health,
    live,
    load,
    metrics,
    model,
    models,
    openapi,
    version,
)
from cairn.serve.http.endpoints.adapters import load_adapter, unload_adapter
from cairn.serve.http.endpoints.batches import (
    cancel_batch,
    create_batch,
    create_file,
    delete_file,
    file_content,
    get_batch,
    get_file,
    list_batches,
    list_files,
)
from cairn.serve.http.endpoints.chat import chat_completions
from cairn.serve.http.endpoints.cohere import cohere_embed, cohere_error, cohere_rerank
from cairn.serve.http.endpoints.completions import completions
from cairn.serve.http.endpoints.embed import api_embed, api_embeddings, embed, embedding
from cairn.serve.http.endpoints.embeddings import EmbeddingRequest, embeddings
from cairn.serve.http.endpoints.llamacpp import (
    apply_template,
    completion,
    infill,
    props,
    slots,
)
from cairn.serve.http.endpoints.messages import anthropic_error, count_tokens, messages
from cairn.serve.http.endpoints.ollama import api_chat, api_generate, ollama_error
from cairn.serve.http.endpoints.ollama_models import api_ps, api_show, api_tags, api_version
from cairn.serve.http.endpoints.prefill import prefill
from cairn.serve.http.endpoints.pulse import pulse
from cairn.serve.http.endpoints.rerank import (
    ClassifyRequest,
    RerankRequest,
    ScoreRequest,
    classify,
    rerank,
    score,
)
from cairn.serve.http.endpoints.responses import (
    delete_response,
    input_items,
    response,
    responses,
)
from cairn.serve.http.endpoints.role import role
from cairn.serve.http.endpoints.sleep import is_sleeping, sleep, wake_up
from cairn.serve.http.endpoints.tokens import (
    chat_input_tokens,
    detokenize,
    responses_input_tokens,
    tokenize,
)
from cairn.serve.http.endpoints.transcriptions import transcriptions, translations
from cairn.serve.http.endpoints.weights import pause, reset_prefix_cache, resume, update_weights
from cairn.serve.http.ledger.endpoints import (
    engine,
    engine_events,
    model_view,
    request,
    request_trace,
    requests,
    trace,
    usage,
)
from cairn.serve.http.protocol.messages import MessagesRequest
from cairn.serve.http.protocol.requests import (
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from cairn.serve.http.protocol.responses import ResponsesRequest
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service

Handle = Callable[[Service, Call, bytes], Awaitable[Response | None]]
FIELDS = tuple({
    name for kind in (ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest, EmbeddingRequest,
                      TokenizeRequest, RerankRequest, ScoreRequest, ClassifyRequest)
    for name in kind.__struct_fields__
})  # fmt: skip
PROMPT_IN = {"chat_completions": "messages", "completions": "prompt", "embeddings": "input", "classify": "input",
             "embed": "inputs", "cohere_embed": "texts", "api_embed": "input", "api_embeddings": "prompt",
             "responses": "input", "messages": "messages", "count_tokens": "messages",
             "completion": "prompt", "embedding": "content", "chat_input_tokens": "messages",
             "responses_input_tokens": "input"}  # fmt: skip
ERROR_FORMATS = {
    "messages": anthropic_error,
    "count_tokens": anthropic_error,
    "cohere_embed": cohere_error,
    "cohere_rerank": cohere_error,
    "api_chat": ollama_error,
    "api_embed": ollama_error,
    "api_embeddings": ollama_error,
    "api_generate": ollama_error,
    "api_show": ollama_error,
}
GENERATING = (
    api_chat,
    api_embed,
    api_embeddings,
    api_generate,
    chat_completions,
    classify,
    cohere_embed,
    cohere_rerank,
    completion,
    completions,
    embed,
    embedding,
    embeddings,
    infill,
    messages,
    prefill,
    rerank,
    responses,
    score,
    transcriptions,
    translations,
)
PATHS: tuple[tuple[str, str, Handle], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/input_tokens", chat_input_tokens),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/v1/audio/transcriptions", transcriptions),
    ("POST", "/v1/audio/translations", translations),
    ("POST", "/v1/rerank", rerank),
    ("POST", "/v2/rerank", cohere_rerank),
    ("POST", "/rerank", rerank),
    ("POST", "/v1/score", score),
    ("POST", "/score", score),
    ("POST", "/classify", classify),
    ("POST", "/embed", embed),
    ("POST", "/v2/embed", cohere_embed),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/responses", responses),
    ("POST", "/v1/responses/input_tokens", responses_input_tokens),
    ("GET", "/v1/responses/{id}", response),
    ("GET", "/v1/responses/{id}/input_items", input_items),
    ("DELETE", "/v1/responses/{id}", delete_response),
    ("POST", "/v1/files", create_file),
    ("GET", "/v1/files", list_files),
    ("GET", "/v1/files/{id}", get_file),
    ("GET", "/v1/files/{id}/content", file_content),
    ("DELETE", "/v1/files/{id}", delete_file),
    ("POST", "/v1/batches", create_batch),
    ("GET", "/v1/batches", list_batches),
    ("GET", "/v1/batches/{id}", get_batch),
    ("POST", "/v1/batches/{id}/cancel", cancel_batch),
    ("GET", "/v1/models", models),
    ("GET", "/v1/models/{name:path}", model),
    ("POST", "/cairn/prefill", prefill),
    ("POST", "/cairn/role", role),
    ("POST", "/pause", pause),
    ("POST", "/resume", resume),
    ("POST", "/sleep", sleep),
    ("POST", "/wake_up", wake_up),
    ("GET", "/is_sleeping", is_sleeping),
    ("POST", "/update_weights", update_weights),
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("POST", "/v1/load_lora_adapter", load_adapter),
    ("POST", "/v1/unload_lora_adapter", unload_adapter),
    ("POST", "/completion", completion),
    ("POST", "/infill", infill),
    ("POST", "/embedding", embedding),
    ("POST", "/apply-template", apply_template),
    ("GET", "/props", props),
    ("GET", "/slots", slots),
    ("POST", "/api/chat", api_chat),
    ("POST", "/api/generate", api_generate),
    ("POST", "/api/embed", api_embed),
    ("POST", "/api/embeddings", api_embeddings),
    ("POST", "/api/show", api_show),
    ("GET", "/api/ps", api_ps),
    ("GET", "/api/tags", api_tags),
    ("GET", "/api/version", api_version),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/cairn/engine", engine),
    ("GET", "/cairn/engine/events", engine_events),
    ("GET", "/cairn/usage", usage),
    ("GET", "/cairn/pulse", pulse),
    ("GET", "/cairn/requests", requests),
    ("GET", "/cairn/requests/{id}", request),
    ("GET", "/cairn/requests/{id}/trace", request_trace),
    ("GET", "/cairn/trace", trace),
    ("GET", "/cairn/model", model_view),
    ("GET", "/health", health),
    ("GET", "/live", live),
    ("GET", "/load", load),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("GET", "/openapi.json", openapi),
)
# The same under other names: clients differ in whether /v1 belongs to the address of a server, and llama.cpp's server
# and vLLM's have all of these. /completions is llama.cpp's, which is not OpenAI's.
ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/chat/completions/input_tokens": "/v1/chat/completions/input_tokens",
    "/completions": "/completion",
    "/embeddings": "/v1/embeddings",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/audio/transcriptions": "/v1/audio/transcriptions",
    "/reranking": "/rerank",
    "/v1/reranking": "/rerank",
    "/models": "/v1/models",
    "/v1/health": "/health",
    "/ping": "/health",
}
# Paths that only clients of llama.cpp use, with its names of errors.
LLAMA_CPP = ("/completion", "/completions", "/infill", "/embedding", "/chat/completions")
OPEN_TO_ALL = (api_version, health, live, version, openapi)  # without a key
