"""Response bodies of chat, completions, models and tokens, with OpenAI's names."""

from typing import Literal

import msgspec

from cairn import __version__
from cairn.serve.answer import CompletionOutput

FINGERPRINT = f"build-cairn-{__version__}"  # of the software; llama.cpp's begins with a b, too
Numbers = (
    dict[str, float] | msgspec.UnsetType
)  # llama.cpp's timings, and how much of a prompt was read
Reason = Literal["stop", "length", "abort", "tool_calls"]


def reason_of(output: CompletionOutput) -> Reason | None:
    """The engine's reason in OpenAI's terms; an error never gets here."""
    return None if output.finish_reason == "error" else output.finish_reason


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    image_tokens: int | msgspec.UnsetType = msgspec.UNSET  # where the prompt has pictures


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens = CachedTokens()
    completion_tokens_details: ReasoningTokens | msgspec.UnsetType = msgspec.UNSET  # of a chat


# -- chat -----------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class PromptLogprob(msgspec.Struct):
    """Log probability of a prompt token or an alternative, in vLLM's format."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int | None = None  # in a stream: which call this continues
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str = FINGERPRINT
    timings: Numbers = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET  # with the reason
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str = FINGERPRINT
    timings: Numbers = msgspec.UNSET
    prompt_progress: Numbers = msgspec.UNSET


# -- completions ----------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Reason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, kw_only=True):
    """A whole completion, and a chunk of one in a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    system_fingerprint: str = FINGERPRINT
    timings: Numbers = msgspec.UNSET
    weights_version: int | msgspec.UnsetType = (
        msgspec.UNSET
    )  # with return_token_ids, of a whole one


# -- models, tokens, version ----------------------------------------------------------------------


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "cairn"
    max_model_len: int
    parent: str | msgspec.UnsetType | None = msgspec.UNSET  # of an adapter
    root: str | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Piece(msgspec.Struct):
    """A token as llama.cpp writes it; part of a character is a list of its bytes."""

    id: int
    piece: str | list[int]


class Tokenized(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int | Piece]
    token_strs: list[str] | None = None


class InputTokens(msgspec.Struct):
    """Length of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class Detokenized(msgspec.Struct):
    prompt: str
    content: str  # the same under llama.cpp's name


class Version(msgspec.Struct):
    version: str


class Health(msgspec.Struct, kw_only=True):
    status: Literal["ok", "asleep", "stalled", "dead", "starting", "draining"]
    reason: str | None = None
    running: int = 0
    waiting: int = 0
    steps: int = 0
