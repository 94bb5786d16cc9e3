"""The answers of an exchange as a stream of events: the loop that chat and completions share.

    exchange.next -> bytes -> send, which waits for a slow client
    exchange.pour -> bytes -> straight to the socket, for as long as the client keeps up

The first way is right everywhere; the second one costs a fraction of it, and is left as soon as a buffer is full. What
the events of an endpoint look like is the endpoint's business.
"""

from collections.abc import Callable, Sequence

from cairn.serve.answer import CompletionOutput
from cairn.serve.http.refusal import Refusal
from cairn.serve.http.service import Call, Exchange
from cairn.serve.http.sse import EventStream

Write = Callable[[CompletionOutput], bytes]  # a delta as events; empty: there is nothing to see yet


async def stream_answers(
    call: Call, exchange: Exchange, write: Write, last: Callable[[], Sequence[object]]
) -> None:
    """Until all answers have ended, and then what `last` says. A refusal before the first event is raised."""
    events = EventStream(call.send, call.headers)

    def push(deltas: Sequence[CompletionOutput]) -> bool:
        return events.write_now(b"".join(map(write, deltas)))

    try:
        while not exchange.finished:
            body = b"".join(map(write, await exchange.next()))
            if body:
                await events.write_bytes(body)
            if events.direct:
                await exchange.pour(push)
        await events.write(*last(), last=True)
    except Refusal as refusal:
        if not events.begun:
            raise
        await events.write(refusal.body(), last=True)
