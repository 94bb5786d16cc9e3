"""OpenAI's Responses as Structs: what is asked and what is answered."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cairn.serve.engine.sampling_params import SHARE_ABOVE_0
from cairn.serve.http.protocol.answers import CachedTokens, ReasoningTokens
from cairn.serve.http.protocol.requests import Effort
from cairn.serve.http.protocol.sampling import Most, Priority, Temperature

Status = Literal["in_progress", "completed", "incomplete"]
Truncation = Literal["auto", "disabled"]


class FunctionTool(msgspec.Struct, kw_only=True):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # calls that are demanded always follow their schema


class TextFormat(msgspec.Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Effort | None = None  # for the chat template; "none" asks it for no thought


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    ledger: bool | None = None  # the answer says where its time went
    max_output_tokens: Most | None = None  # -1: what the context leaves
    temperature: Temperature | None = None
    top_p: Annotated[float, SHARE_ABOVE_0] | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    priority: Priority | None = None
    # auto: the oldest turns are left out where the conversation is longer than the context.
    truncation: Truncation | None = None
    store: bool | None = None  # false: it is not kept, also by a server that keeps responses
    previous_response_id: str | None = None
    # Known, and refused: they ask for something that is kept here, or that runs later.
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None  # only log-probabilities are refused


# -- answers --------------------------------------------------------------------------------------


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: Status = "in_progress"


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: Status = "in_progress"


Item = OutputMessage | FunctionCallItem | ReasoningItem


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: ReasoningTokens = ReasoningTokens()
    total_tokens: int


class ModelResponse(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Status = "in_progress"
    model: str
    output: list[Item] = []
    usage: ResponseUsage | None = None
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[FunctionTool] = []
    max_output_tokens: int | None = None
    text: TextOptions | msgspec.UnsetType = msgspec.UNSET
    store: bool = False
    truncation: Truncation = "disabled"
    previous_response_id: str | None = None


class ItemList(msgspec.Struct, kw_only=True):
    """GET /v1/responses/{id}/input_items"""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
