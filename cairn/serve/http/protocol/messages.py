"""Anthropic's Messages as Structs: what is asked and what is answered. The names and the shapes are theirs."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cairn.serve.http.protocol.sampling import AtLeastOne, Share

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class CustomTool(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None  # tools that Anthropic runs itself have another one than "custom"


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct, kw_only=True):
    """Told to the chat template. How long a model thinks is its own affair: `budget_tokens` is checked, and no more."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: AtLeastOne | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[CustomTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # where older clients say it
    mcp_servers: list[dict[str, Any]] | None = None  # refused: no tool is run here


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: AtLeastOne
    stream: bool | None = None
    ledger: bool | None = None  # the answer says where its time went
    temperature: Share | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    stop_sequences: list[str] | None = None


class ModelInfo(msgspec.Struct, kw_only=True):
    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int


class ModelPage(msgspec.Struct, kw_only=True):
    """GET /v1/models, for clients that name a version of Anthropic's interface."""

    data: list[ModelInfo]
    has_more: bool = False
    first_id: str | None = None
    last_id: str | None = None


# -- answers --------------------------------------------------------------------------------------


class Counted(msgspec.Struct):
    input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""  # nothing is signed here, and nothing has to be


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class AnthropicErrorInfo(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    type: Literal["error"] = "error"
    error: AnthropicErrorInfo
