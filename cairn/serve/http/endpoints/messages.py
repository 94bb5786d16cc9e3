"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's interface over the same engine.

    message_start, for each block: content_block_start, content_block_delta ..., content_block_stop,
    then message_delta with the reason and the usage, message_stop

Blocks are thinking, text and tool_use. Mistakes are reported in Anthropic's form, with the same words as everywhere
else.
"""

from typing import Any

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.chat.blocks import Block, Blocks, Change
from cairn.serve.http.chat.conversation import read_conversation
from cairn.serve.http.chat.prepare import prepare_chat
from cairn.serve.http.chat.structure import offer_of
from cairn.serve.http.endpoints.messages_input import as_chat, guide_of
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.messages import (
    AnthropicError,
    AnthropicErrorInfo,
    AnthropicMessage,
    Counted,
    CountRequest,
    MessagesRequest,
    MessageUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    ToolUseBlock,
)
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import HOLE, Template, event_bytes

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
DELTAS = {
    "text": ("text_delta", "text"),
    "thought": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def anthropic_error(refusal: Refusal) -> JSON:
    """A refusal as their clients read it."""
    return JSON(_error(refusal), refusal.status, refusal.headers())


def _error(refusal: Refusal) -> AnthropicError:
    """Theirs has no field for the name of what is wrong; where the message does not say it, it is put in front."""
    kind = KINDS.get(
        refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error"
    )
    message = refusal.message
    if refusal.param is not None and refusal.param not in message:
        message = f"{refusal.param}: {message}"
    return AnthropicError(error=AnthropicErrorInfo(type=kind, message=message))


async def count_tokens(service: Service, call: Call, body: bytes) -> JSON:
    payload = decode(body, CountRequest)
    service.check_model(payload.model)
    chat = as_chat(payload)
    offer_of(service, chat)  # refuses tools that could not be used
    prompt = await read_conversation(service, chat, any_length=True)
    return JSON(Counted(len(prompt.token_ids)))


async def messages(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, MessagesRequest)
    model = service.check_model(payload.model)
    prepared = await prepare_chat(service, as_chat(payload), guide_of(payload), payload.max_tokens)
    call.cut_to = prepared.cut_to
    blocks = Blocks(prepared.readers[0])
    usage = MessageUsage(input_tokens=len(prepared.prompt.token_ids), output_tokens=0)
    message = AnthropicMessage(id=f"msg_{call.id}", model=model, content=[], usage=usage)
    exchange = Exchange(
        service, call, [prepared.request], model, stream=payload.stream, ledger=payload.ledger
    )
    async with exchange:
        if payload.stream:
            await exchange.stream(EventWriter(message, blocks, exchange))
            return None
        await exchange.finish()
        done = exchange.jobs[0].answer.result()
        blocks.push(done)
        message.content = [_whole(block) for block in blocks.whole()]
        message.stop_reason, message.stop_sequence = _ended(blocks, done)
        message.usage = _usage(message, exchange)
        return JSON(message)


def _whole(block: Block) -> TextBlock | ThinkingBlock | ToolUseBlock:
    match block.kind:
        case "thought":
            return ThinkingBlock(thinking=block.text)
        case "call":
            return ToolUseBlock(id=block.id, name=block.name, input=_arguments(block.text))
        case _:
            return TextBlock(text=block.text)


def _arguments(text: str) -> dict[str, Any]:
    """Parse tool arguments; truncated or invalid JSON is returned as text."""
    try:
        arguments = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return {"unfinished": text}
    return arguments if isinstance(arguments, dict) else {"unfinished": text}


def _ended(blocks: Blocks, output: CompletionOutput) -> tuple[StopReason, str | None]:
    if isinstance(output.stop_reason, str):
        return "stop_sequence", output.stop_reason
    reason = blocks.reason(output)
    if reason == "tool_calls":
        return "tool_use", None
    return ("end_turn" if reason == "stop" else "max_tokens"), None


def _usage(message: AnthropicMessage, exchange: Exchange) -> MessageUsage:
    """Tokens of the prompt that were found in the cache are counted apart."""
    output_tokens, cached = len(exchange.jobs[0].answer.whole.token_ids), exchange.cached
    rest = message.usage.input_tokens - cached
    return MessageUsage(
        input_tokens=rest, output_tokens=output_tokens, cache_read_input_tokens=cached
    )


# -- a stream -------------------------------------------------------------------------------------


class EventWriter:
    """A message as the events of a stream. Most are nothing but more text, which takes a template."""

    def __init__(self, message: AnthropicMessage, blocks: Blocks, exchange: Exchange) -> None:
        self._message, self._blocks, self._exchange = message, blocks, exchange
        self._begun = False
        self._more: dict[int, Template] = {}  # by block
        self._end: tuple[StopReason, str | None] = "end_turn", None

    def write(self, delta: CompletionOutput) -> bytes:
        body = b"" if self._begun else self._start()
        self._begun = True
        body += b"".join(map(self._change, self._blocks.push(delta)))
        if delta.finished:
            self._end = _ended(self._blocks, delta)
        return body

    def _start(self) -> bytes:
        """The message_start event, sent with the first token, when the cached prompt tokens are known."""
        usage = _usage(self._message, self._exchange)
        usage.output_tokens = 0
        return _event("message_start", message=msgspec.structs.replace(self._message, usage=usage))

    def last(self) -> bytes:
        reason, sequence = self._end
        ended = {"stop_reason": reason, "stop_sequence": sequence}
        usage = _usage(self._message, self._exchange)
        return _event("message_delta", delta=ended, usage=usage) + _event("message_stop")

    def refused(self, refusal: Refusal) -> bytes:
        return event_bytes(_error(refusal), "error")

    def _change(self, change: Change) -> bytes:
        block = change.block
        match change.what:
            case "begin":
                empty = _whole(Block(index=0, kind=block.kind, id=block.id, name=block.name))
                if isinstance(empty, ToolUseBlock):
                    empty.input = {}
                return _event("content_block_start", index=block.index, content_block=empty)
            case "more":
                if block.index not in self._more:
                    self._more[block.index] = _template(block)
                return self._more[block.index].fill(change.text)
            case _:
                return _event("content_block_stop", index=block.index)


def _event(name: str, **fields: object) -> bytes:
    return event_bytes({"type": name, **fields}, name)


def _template(block: Block) -> Template:
    kind, field = DELTAS[block.kind]
    name, delta = "content_block_delta", {"type": kind, field: HOLE}
    return Template({"type": name, "index": block.index, "delta": delta}, name)
