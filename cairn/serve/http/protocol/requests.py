"""Request bodies. Unknown fields are ignored; a wrong type or range is a 400 that names the field."""

from typing import Any, Literal

import msgspec

from cairn.serve.http.protocol.sampling import (
    AtLeastOne,
    Count,
    Most,
    SamplingFields,
    TopLogprobs,
)

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    max_tokens: Most | None = None
    max_completion_tokens: Most | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None  # the answer goes on where the last message ends
    chat_template: str | None = None  # for servers that trust their clients with one
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None  # for templates that know it; "none" asks for no thought
    documents: list[dict[str, Any]] | None = None
    functions: list[dict[str, Any]] | None = None  # refused: what came before tools
    modalities: list[str] | None = None  # text is what there is
    web_search_options: dict[str, Any] | None = None  # refused: this server searches nothing


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]
    add_special_tokens: bool | None = None  # around texts, such as BOS; true
    max_tokens: Most | None = None
    logprobs: TopLogprobs | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: AtLeastOne | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: text, or a conversation through the chat template."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None  # the text under llama.cpp's name
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    documents: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None  # of `content`
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None  # llama.cpp's: each token with its text


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[Count]
    skip_special_tokens: bool | None = None
