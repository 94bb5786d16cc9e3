"""GET /cairn/pulse: one stream that tells a router what is cached here and how busy the server is.

    Hello, Events 0 (everything), Load | Events, Load ...     see `serve.pulse`

The engine notes its pages only while there is a follower.
"""

import asyncio
from contextlib import suppress

from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service
from cairn.serve.pulse import Load, framed

PERIOD_S = 0.05
MEDIA_TYPE = b"application/x-cairn-pulse"


async def pulse(service: Service, call: Call, body: bytes) -> None:
    """Until the router leaves, or the server is stopped."""
    events = call.event_stream(MEDIA_TYPE)
    gone = asyncio.ensure_future(_gone(call))
    follower = await service.pulse.join()
    try:
        await events.write(b"".join(map(framed, follower.greet())))
        while not gone.done() and not service.admission.draining:
            if frames := follower.due():
                await events.write(b"".join(map(framed, frames)))
            await asyncio.wait([gone], timeout=PERIOD_S)
        if not gone.done():
            await events.write(framed(Load(status="draining")), last=True)
    finally:
        service.pulse.leave(follower)
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def _gone(call: Call) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass
