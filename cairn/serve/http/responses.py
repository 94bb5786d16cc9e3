"""POST /v1/responses: OpenAI's newer interface over the same engine; text only, nothing is kept between two calls.

created, in_progress, output_item.added, content_part.added, output_text.delta ..., then each "done", completed
"""

import itertools
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import Job
from cairn.serve.http.body import decode
from cairn.serve.http.conversation import flat_messages
from cairn.serve.http.protocol_answers import CachedTokens
from cairn.serve.http.protocol_sampling import AtLeastOne
from cairn.serve.http.refusal import JSON, Refusal
from cairn.serve.http.service import Call, Exchange, Service
from cairn.serve.http.sse import EventStream

Status = Literal["in_progress", "completed", "incomplete"]
UNSUPPORTED = ("tools", "previous_response_id", "conversation", "background", "prompt")


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: AtLeastOne | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    previous_response_id: str | None = None
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None


class OutputText(msgspec.Struct, kw_only=True):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status = "in_progress"
    content: list[OutputText] = []


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


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
    output: list[OutputMessage] = []
    usage: ResponseUsage | None = None
    error: None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = False
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: str = "none"
    tools: list[Any] = []
    max_output_tokens: int | None = None


async def responses(service: Service, call: Call, body: bytes) -> JSON | None:
    asked = decode(body, ResponsesRequest)
    model = service.check_model(asked.model)
    _check(asked)
    prompt = await _prompt(service, asked)
    params = _params(service, asked)

    def jobs(on_news: Callable[[Job], None]) -> list[Job]:
        return service.backend.jobs(prompt, params, on_news)

    made = ModelResponse(
        id=f"resp_{call.id}", created_at=int(time.time()), model=model, instructions=asked.instructions,
        temperature=params.temperature, top_p=params.top_p, max_output_tokens=asked.max_output_tokens,
    )  # fmt: skip
    async with service.exchange(call, jobs) as exchange:
        if asked.stream:
            await _stream(made, exchange, call)
            return None
        while not exchange.finished:
            await exchange.next()
        done = exchange.jobs[0].answer.result()
        message = OutputMessage(id=f"msg_{call.id}", content=[OutputText(text=done.text)])
        _complete(made, message, done, exchange)
        return JSON(made)


def _check(asked: ResponsesRequest) -> None:
    for name in UNSUPPORTED:
        if getattr(asked, name):
            raise Refusal(
                400, f"{name} is not supported by this server", param=name, code="unsupported"
            )
    form = (asked.text or {}).get("format") or {}
    kind = form.get("type", "text") if isinstance(form, dict) else form
    if kind != "text":
        raise Refusal(400, f"text.format.type is {str(kind)[:40]!r}; this server has only 'text'", param="text",
                      code="unsupported")  # fmt: skip


async def _prompt(service: Service, asked: ResponsesRequest) -> list[int]:
    said = (
        [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input
    )
    for at, item in enumerate(said):
        if item.get("type", "message") != "message":
            kind = str(item.get("type"))[:40]
            raise Refusal(
                400, f"input[{at}].type is {kind!r}; only messages are supported", param="input"
            )
    roles = [
        {**item, "role": "system"} if item.get("role") == "developer" else item for item in said
    ]
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    text = service.tokenizer.chat(flat_messages([*first, *roles]))
    return await service.encode(text, special=False)


def _params(service: Service, asked: ResponsesRequest) -> SamplingParams:
    given = {
        name: value
        for name in ("temperature", "top_p")
        if (value := getattr(asked, name)) is not None
    }
    limits = [most for most in (asked.max_output_tokens, service.config.max_request_tokens) if most]
    return SamplingParams(**given, max_tokens=min(limits, default=None))


def _complete(
    made: ModelResponse, message: OutputMessage, done: CompletionOutput, exchange: Exchange
) -> None:
    cut = done.finish_reason != "stop"
    made.status = message.status = "incomplete" if cut else "completed"
    made.incomplete_details = {"reason": "max_output_tokens"} if cut else None
    made.output = [message]
    job = exchange.jobs[0]
    asked, given = len(job.request.prompt), len(job.answer.whole.token_ids)
    made.usage = ResponseUsage(
        input_tokens=asked, input_tokens_details=CachedTokens(exchange.cached), output_tokens=given,
        total_tokens=asked + given,
    )  # fmt: skip


async def _stream(made: ModelResponse, exchange: Exchange, call: Call) -> None:
    events, numbers = EventStream(call.send, call.headers), itertools.count()
    message = OutputMessage(id=f"msg_{call.id}")
    place = dict(item_id=message.id, output_index=0, content_index=0)

    async def write(name: str, **fields: object) -> None:
        kind = f"response.{name}"
        await events.write_named(kind, {"type": kind, "sequence_number": next(numbers), **fields})

    try:
        deltas = await exchange.next()
        await write("created", response=made)
        await write("in_progress", response=made)
        await write("output_item.added", output_index=0, item=message)
        await write("content_part.added", part=OutputText(), **place)
        while True:
            for delta in deltas:
                if delta.text:
                    await write("output_text.delta", delta=delta.text, logprobs=[], **place)
            if exchange.finished:
                break
            deltas = await exchange.next()
        done = exchange.jobs[0].answer.result()
        part = OutputText(text=done.text)
        message.content = [part]
        _complete(made, message, done, exchange)
        await write("output_text.done", text=done.text, logprobs=[], **place)
        await write("content_part.done", part=part, **place)
        await write("output_item.done", output_index=0, item=message)
        await write("incomplete" if made.status == "incomplete" else "completed", response=made)
    except Refusal as refusal:
        if not events.begun:
            raise
        error = refusal.body().error
        fields = {"code": error.code, "message": error.message, "param": error.param}
        await events.write_named(
            "error", {"type": "error", "sequence_number": next(numbers), **fields}
        )
    await events.write_bytes(b"", True)
