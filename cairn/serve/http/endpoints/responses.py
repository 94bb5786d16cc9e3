"""/v1/responses: OpenAI's newer interface over the same engine. Answers are kept where `--store-responses` says so.

created, in_progress, for each item: output_item.added, its deltas, each "done", output_item.done; then completed

message        content_part.added, output_text.delta ..., output_text.done, content_part.done
reasoning      content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done
function_call  function_call_arguments.delta ..., function_call_arguments.done
"""

import itertools
import secrets
import time
from collections.abc import Callable

import msgspec

from cairn.serve.answer import CompletionOutput
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.http.chat.blocks import Block, Blocks, Change
from cairn.serve.http.chat.conversation import without_oldest
from cairn.serve.http.chat.prepare import prepare_chat
from cairn.serve.http.chat.thought_tokens import thought_tokens
from cairn.serve.http.endpoints.pages import in_order, page_of, query_of
from cairn.serve.http.endpoints.responses_input import as_chat, guide_of, items_of, listed_items
from cairn.serve.http.protocol.answers import ReasoningTokens
from cairn.serve.http.protocol.body import decode
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.protocol.responses import (
    FunctionCallItem,
    Item,
    ItemList,
    ModelResponse,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponsesRequest,
    ResponseUsage,
    Status,
)
from cairn.serve.http.protocol.sampling import most_of
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.response_store import Stored
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import event_bytes

LISTED, MOST_LISTED = 20, 100  # items of a page, as OpenAI has it


async def responses(service: Service, call: Call, body: bytes) -> JSON | None:
    payload = decode(body, ResponsesRequest)
    model = service.check_model(payload.model)
    most = most_of(payload, "max_output_tokens")
    before = _earlier(service, call, payload.previous_response_id)
    earlier = before.items if before is not None else []
    chat = as_chat(payload, earlier, sees=service.serving.picture_input is not None)
    if payload.truncation == "auto":
        chat = await without_oldest(service, chat, most)
    prepared = await prepare_chat(service, chat, guide_of(payload), most)
    call.cut_to = prepared.cut_to
    blocks = Blocks(prepared.readers[0])
    reply = _begun(payload, model, prepared.request.params, response_id(service, call))
    reply.store = service.responses.most > 0 and payload.store is not False
    exchange = Exchange(
        service, call, [prepared.request], model, stream=payload.stream, ledger=payload.ledger
    )

    def keep() -> None:
        _keep(service, call, payload, reply, before, len(body))

    async with exchange:
        if payload.stream:
            await exchange.stream(EventWriter(reply, blocks, exchange, keep))
            return None
        await exchange.finish()
        done = exchange.jobs[0].answer.result()
        blocks.push(done)
        _complete(reply, blocks, done, exchange)
        keep()
        return JSON(reply)


# -- answers that are kept ------------------------------------------------------------------------


async def response(service: Service, call: Call, body: bytes) -> JSON:
    """GET /v1/responses/{id}"""
    if query_of(call).get("stream") == "true":
        message = "stream is true; a kept response is given whole"
        raise Refusal(400, message, param="stream", code="unsupported")
    return JSON(_stored(service, call, call.scope["path_params"]["id"], "id").response)


async def input_items(service: Service, call: Call, body: bytes) -> JSON:
    """GET /v1/responses/{id}/input_items: what it was asked with, the conversation before it included."""
    stored = _stored(service, call, call.scope["path_params"]["id"], "id")
    items = in_order(call, listed_items(stored.inputs, stored.response.id)[::-1])
    data, more = page_of(call, items, [item["id"] for item in items], LISTED, MOST_LISTED)
    ends = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return JSON(ItemList(data=data, first_id=ends[0], last_id=ends[1], has_more=more))


async def delete_response(service: Service, call: Call, body: bytes) -> JSON:
    """DELETE /v1/responses/{id}"""
    id = call.scope["path_params"]["id"]
    _stored(service, call, id, "id")
    service.responses.drop(call.holder, id)
    return JSON({"id": id, "object": "response", "deleted": True})


def _stored(service: Service, call: Call, id: str, param: str) -> Stored:
    store = service.responses
    if store.most == 0:
        message = (
            f"{param} is not supported by this server: it keeps no responses (--store-responses)"
        )
        raise Refusal(404 if param == "id" else 400, message, param=param, code="unsupported")
    stored = store.get(call.holder, id)
    if stored is None:
        message = f"response {id[:128]!r} is not kept; the last {store.most} are"
        raise Refusal(404, message, param=param, code="response_not_found")
    return stored


def response_id(service: Service, call: Call) -> str:
    """Never the client's x-request-id, which may be known to others or come again. A server that continues an answer
    finds the id of the one before it."""
    id = f"resp_{secrets.token_hex(12)}"
    if service.router_secret is not None and call.routed:
        same = service.router_secret.proof(b"response", call.holder.encode(), call.id.encode())
        id = f"resp_{same.hex()[:24]}"
        if service.responses.get(call.holder, id) is not None:
            return f"resp_{secrets.token_hex(12)}"
    return id


def _earlier(service: Service, call: Call, id: str | None) -> Stored | None:
    return None if not id else _stored(service, call, id, "previous_response_id")


def _keep(
    service: Service,
    call: Call,
    payload: ResponsesRequest,
    reply: ModelResponse,
    before: Stored | None,
    asked_bytes: int,
) -> None:
    if reply.store and reply.status != "in_progress":
        output = msgspec.to_builtins(reply.output)
        size = asked_bytes + len(msgspec.json.encode(output))
        service.responses.put(call.holder, Stored(reply, items_of(payload), output, before, size))


def _begun(payload: ResponsesRequest, model: str, params: SamplingParams, id: str) -> ModelResponse:
    reply = ModelResponse(
        id=id,
        created_at=int(time.time()),
        model=model,
        instructions=payload.instructions,
        temperature=params.temperature,
        top_p=params.top_p,
        max_output_tokens=payload.max_output_tokens,
        metadata=payload.metadata or {},
        parallel_tool_calls=payload.parallel_tool_calls is not False,
        tools=payload.tools or [],
        tool_choice=payload.tool_choice or "auto",
        previous_response_id=payload.previous_response_id,
    )
    reply.truncation = payload.truncation or "disabled"
    if payload.text is not None:
        reply.text = payload.text
    return reply


def item_of(block: Block, response: str, status: Status) -> Item:
    """A block as the item that it is; while it grows, without its text."""
    id, text = f"{response}_{block.index}", block.text
    grown = status != "in_progress"
    match block.kind:
        case "call":
            return FunctionCallItem(
                id=f"fc_{id}",
                call_id=block.id,
                name=block.name,
                arguments=text if grown else "",
                status=status,
            )
        case "thought":
            thought = [ReasoningText(text=text)] if grown else []
            return ReasoningItem(id=f"rs_{id}", content=thought, status=status)
        case _:
            parts = [OutputText(text=text)] if grown else []
            return OutputMessage(id=f"msg_{id}", content=parts, status=status)


def _complete(
    reply: ModelResponse, blocks: Blocks, done: CompletionOutput, exchange: Exchange
) -> None:
    """All but the last item are whole, however the answer ended."""
    cut = done.finish_reason != "stop"
    reply.status = "incomplete" if cut else "completed"
    reply.incomplete_details = {"reason": "max_output_tokens"} if cut else None
    short = reply.id.removeprefix("resp_")
    *before, last = blocks.all
    reply.output = [item_of(block, short, "completed") for block in before]
    reply.output.append(item_of(last, short, reply.status))
    job = exchange.jobs[0]
    ids = job.answer.whole.token_ids
    input_tokens, output_tokens = len(job.request.prompt), len(ids)
    thought = thought_tokens(ids, blocks.thought, exchange.tokenizer)
    reply.usage = ResponseUsage(
        input_tokens=input_tokens,
        input_tokens_details=exchange.prompt_details,
        output_tokens=output_tokens,
        output_tokens_details=ReasoningTokens(thought),
        total_tokens=input_tokens + output_tokens,
    )


class EventWriter:
    """A response as the events of a stream. It is kept before its last event: the next request may name it at once."""

    def __init__(
        self, reply: ModelResponse, blocks: Blocks, exchange: Exchange, keep: Callable[[], None]
    ) -> None:
        self._made, self._blocks, self._exchange, self._keep = reply, blocks, exchange, keep
        self._numbers = itertools.count()
        self._begun = False
        self._moved = exchange.moved
        self._ended: CompletionOutput | None = None

    def write(self, delta: CompletionOutput) -> bytes:
        body = b""
        if not self._begun:
            self._begun = True
            body = self._event("created", response=self._made)
            body += self._event("in_progress", response=self._made)
        if delta.finished:
            self._ended = delta
        body += b"".join(self._change(change) for change in self._blocks.push(delta))
        if self._moved:  # each of these tokens may have been an event where it was made
            self._numbers = itertools.count(next(self._numbers) + self._moved)
            self._moved = 0
        return body

    def last(self) -> bytes:
        reply = self._made
        if self._ended is not None:
            _complete(reply, self._blocks, self._ended, self._exchange)
        self._keep()
        name = "incomplete" if reply.status == "incomplete" else "completed"
        return self._event(name, response=reply)

    def refused(self, refusal: Refusal) -> bytes:
        error = refusal.body().error
        fields = {"code": error.code, "message": error.message, "param": error.param}
        number = next(self._numbers)
        return event_bytes({"type": "error", "sequence_number": number, **fields}, "error")

    def _change(self, change: Change) -> bytes:
        block = change.block
        if change.what == "begin":
            return self._begin(self._item(block, "in_progress"), block.index)
        if change.what == "more":
            item = self._item(block, "in_progress")
            name, place = _delta_of(item), self._place(item, block.index)
            return self._event(f"{name}.delta", delta=change.text, **place)
        ended, last = self._ended, block is self._blocks.all[-1]
        cut = ended is not None and last and ended.finish_reason != "stop"
        return self._end(self._item(block, "incomplete" if cut else "completed"), block.index)

    def _item(self, block: Block, status: Status) -> Item:
        return item_of(block, self._made.id.removeprefix("resp_"), status)

    def _place(self, item: Item, index: int) -> dict[str, object]:
        place: dict[str, object] = {"item_id": item.id, "output_index": index}
        if not isinstance(item, FunctionCallItem):
            place["content_index"] = 0
        if isinstance(item, OutputMessage):
            place["logprobs"] = []
        return place

    def _begin(self, item: Item, index: int) -> bytes:
        body = self._event("output_item.added", output_index=index, item=item)
        if not isinstance(item, FunctionCallItem):
            part = OutputText() if isinstance(item, OutputMessage) else ReasoningText()
            place = dict(item_id=item.id, output_index=index, content_index=0)
            body += self._event("content_part.added", part=part, **place)
        return body

    def _end(self, item: Item, index: int) -> bytes:
        name, place = _delta_of(item), self._place(item, index)
        if isinstance(item, FunctionCallItem):
            body = self._event(f"{name}.done", name=item.name, arguments=item.arguments, **place)
        else:
            [part] = item.content
            body = self._event(f"{name}.done", text=part.text, **place)
            place.pop("logprobs", None)
            body += self._event("content_part.done", part=part, **place)
        return body + self._event("output_item.done", output_index=index, item=item)

    def _event(self, name: str, /, **fields: object) -> bytes:
        kind = f"response.{name}"
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return event_bytes(event, kind)


def _delta_of(item: Item) -> str:
    if isinstance(item, FunctionCallItem):
        return "function_call_arguments"
    return "output_text" if isinstance(item, OutputMessage) else "reasoning_text"
