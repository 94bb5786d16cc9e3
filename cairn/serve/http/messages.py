"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface over the same engine; text only.

    message_start, content_block_start, content_block_delta ..., content_block_stop, message_delta, message_stop

Mistakes are told in Anthropic's form, with the same words as everywhere else.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from cairn.core.errors import CairnError
from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine_thread import Job
from cairn.serve.http.body import decode
from cairn.serve.http.conversation import flat_messages
from cairn.serve.http.protocol_sampling import AtLeastOne, Share
from cairn.serve.http.refusal import JSON, Refusal, refusal_of
from cairn.serve.http.service import Call, Exchange, Service
from cairn.serve.http.sse import EventStream

StopReason = Literal["end_turn", "max_tokens", "stop_sequence"]
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
         503: "overloaded_error"}  # fmt: skip


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens"""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages"""

    max_tokens: AtLeastOne
    stream: bool | None = None
    temperature: Share | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    stop_sequences: list[str] | None = None


class Counted(msgspec.Struct):
    input_tokens: int


class MessageUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0


class TextBlock(msgspec.Struct, kw_only=True):
    type: Literal["text"] = "text"
    text: str


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[TextBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


Handle = Callable[[Service, Call, bytes], Awaitable[JSON | None]]


async def messages(service: Service, call: Call, body: bytes) -> JSON | None:
    return await _in_their_words(_messages, service, call, body)


async def count_tokens(service: Service, call: Call, body: bytes) -> JSON | None:
    return await _in_their_words(_count, service, call, body)


async def _in_their_words(handle: Handle, service: Service, call: Call, body: bytes) -> JSON | None:
    try:
        return await handle(service, call, body)
    except CairnError as error:
        refusal = refusal_of(error, MessagesRequest.__struct_fields__)
    except Refusal as refused:
        refusal = refused
    return JSON(_error(refusal), refusal.status, refusal.headers())


def _error(refusal: Refusal) -> dict[str, Any]:
    kind = KINDS.get(
        refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error"
    )
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


async def _count(service: Service, call: Call, body: bytes) -> JSON:
    asked = decode(body, CountRequest)
    service.check_model(asked.model)
    return JSON(Counted(len(await _prompt(service, asked))))


async def _prompt(service: Service, asked: CountRequest) -> list[int]:
    if asked.tools:
        raise Refusal(400, "tools are not supported here", param="tools")
    system = [{"role": "system", "content": asked.system}] if asked.system else []
    text = service.tokenizer.chat(flat_messages([*system, *asked.messages]))
    return await service.encode(text, special=False)


async def _messages(service: Service, call: Call, body: bytes) -> JSON | None:
    asked = decode(body, MessagesRequest)
    model = service.check_model(asked.model)
    prompt = await _prompt(service, asked)
    given = {
        name: value
        for name in ("temperature", "top_p", "top_k")
        if (value := getattr(asked, name)) is not None
    }
    most = min(asked.max_tokens, service.config.max_request_tokens or asked.max_tokens)
    params = SamplingParams(**given, max_tokens=most, stop=asked.stop_sequences or [])

    def jobs(on_news: Callable[[Job], None]) -> list[Job]:
        return service.backend.jobs(prompt, params, on_news)

    message = AnthropicMessage(
        id=f"msg_{call.id}", model=model, content=[], usage=MessageUsage(input_tokens=len(prompt), output_tokens=0)
    )  # fmt: skip
    async with service.exchange(call, jobs) as exchange:
        if asked.stream:
            await _stream(message, exchange, call)
            return None
        while not exchange.finished:
            await exchange.next()
        done = exchange.jobs[0].answer.result()
        message.content = [TextBlock(text=done.text)]
        message.stop_reason, message.stop_sequence = _ended(done)
        message.usage = _usage(message, exchange)
        return JSON(message)


def _ended(output: CompletionOutput) -> tuple[StopReason, str | None]:
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    return ("end_turn" if output.finish_reason == "stop" else "max_tokens"), None


def _usage(message: AnthropicMessage, exchange: Exchange) -> MessageUsage:
    """Tokens of the prompt that were found in the cache are counted apart."""
    made, cached = len(exchange.jobs[0].answer.whole.token_ids), exchange.cached
    rest = message.usage.input_tokens - cached
    return MessageUsage(input_tokens=rest, output_tokens=made, cache_read_input_tokens=cached)


async def _stream(message: AnthropicMessage, exchange: Exchange, call: Call) -> None:
    events = EventStream(call.send, call.headers)

    async def write(name: str, **fields: object) -> None:
        await events.write_named(name, {"type": name, **fields})

    try:
        deltas = await exchange.next()
        await write("message_start", message=message)
        await write("content_block_start", index=0, content_block=TextBlock(text=""))
        while True:
            for delta in deltas:
                if delta.text:
                    part = {"type": "text_delta", "text": delta.text}
                    await write("content_block_delta", index=0, delta=part)
            if exchange.finished:
                break
            deltas = await exchange.next()
        reason, sequence = _ended(deltas[-1])
        await write("content_block_stop", index=0)
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        await write("message_delta", delta=ended, usage=_usage(message, exchange))
        await write("message_stop")
    except Refusal as refusal:
        if not events.begun:
            raise
        await events.write_named("error", _error(refusal))
    await events.write_bytes(b"", True)
