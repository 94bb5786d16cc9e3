"""The answers of an exchange as a stream of events: the loop that all endpoints share.

    exchange.next -> bytes -> send, which waits for a slow client
    exchange.pour -> bytes -> straight to the socket, for as long as the client keeps up

The first way is right everywhere; the second one costs a fraction of it, and is left as soon as a buffer is full. What
the events of an endpoint look like is the endpoint's business.
"""

from collections.abc import Sequence
from typing import Protocol

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.exchange import Exchange
from cairn.serve.http.server.sse import EventStream
from cairn.serve.http.tools.call import Call


class Writer(Protocol):
    """The events of one stream, as bytes."""

    def write(self, delta: CompletionOutput) -> bytes:
        """Empty: there is nothing to see yet."""
        ...

    def last(self) -> bytes:
        """When all answers have ended."""
        ...

    def refused(self, refusal: Refusal) -> bytes:
        """Instead of the rest."""
        ...


async def stream_answers(call: Call, exchange: Exchange, writer: Writer) -> None:
    """Until all answers have ended. A refusal before the first event is raised."""
    events, write = EventStream(call.send, call.headers), writer.write

    def push(deltas: Sequence[CompletionOutput]) -> bool:
        body = write(deltas[0]) if len(deltas) == 1 else b"".join(map(write, deltas))
        return events.write_now(body)

    try:
        while not exchange.finished:
            body = b"".join(map(write, await exchange.next()))
            if body:
                await events.write(body)
            if events.direct:
                await exchange.pour(push)
        await events.write(writer.last(), last=True)
    except Refusal as refusal:
        if not events.begun:
            raise
        await events.write(writer.refused(refusal), last=True)
