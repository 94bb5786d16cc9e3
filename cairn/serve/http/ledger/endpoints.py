"""GET /cairn/*: the inside of the server, for its page and for other tools.

    /cairn/engine             what the engine does now              /cairn/requests?order=slowest&limit=20
    /cairn/engine/events      the same, twice a second, as a        /cairn/requests/{id}
                              stream of server-sent events          /cairn/requests/{id}/trace   for Perfetto
    /cairn/model              the model card                        /cairn/trace?seconds=30      for Perfetto
    /cairn/usage              tokens, device-seconds and joules of each key

Guarded by the API key like everything that generates. None of it tells what was asked or answered.
"""

import asyncio
import time
from contextlib import suppress
from typing import cast
from urllib.parse import parse_qs

import msgspec

from cairn.serve.http.ledger.engine_view import model_card
from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.recent_ledgers import REMEMBERED, Order
from cairn.serve.http.ledger.trace import trace_of
from cairn.serve.http.ledger.views import RequestList
from cairn.serve.http.protocol.refusal import JSON, Refusal
from cairn.serve.http.server.call import Call
from cairn.serve.http.server.service import Service
from cairn.serve.http.server.sse import event_bytes

EVENT_S = 0.5
LISTED = 100
TRACED_S = 30.0
MOST_TRACED_S = 3600.0
ORDERS = ("newest", "slowest")


async def engine(service: Service, call: Call, body: bytes) -> JSON:
    await _look_at_machine(service)
    return JSON(service.look.view())


async def engine_events(service: Service, call: Call, body: bytes) -> None:
    """Until the client leaves, or the server is stopped."""
    events = call.event_stream()
    gone = asyncio.ensure_future(_gone(call))
    try:
        while not gone.done() and not service.admission.draining:
            await _look_at_machine(service)
            await events.write(event_bytes(service.look.view()))
            await asyncio.wait([gone], timeout=EVENT_S)
        if not gone.done():
            await events.write(b"", True)
    finally:
        gone.cancel()
        with suppress(asyncio.CancelledError):
            await gone


async def _gone(call: Call) -> None:
    while (await call.receive())["type"] != "http.disconnect":
        pass


async def usage(service: Service, call: Call, body: bytes) -> JSON:
    """Usage of each API key."""
    stats = service.serving.engine.stats()
    return JSON(service.accounts.view(stats, service.lag.worst_s))


async def requests(service: Service, call: Call, body: bytes) -> JSON:
    order = _query(call, "order", "newest")
    if order not in ORDERS:
        raise Refusal(
            400, f"order is {order[:40]!r}; it has to be newest or slowest", param="order"
        )
    limit = _number(call, "limit", LISTED, 1, REMEMBERED)
    book = service.book
    entries = book.entries(cast(Order, order), int(limit))
    return JSON(RequestList(requests=[book.view(entry) for entry in entries]))


async def request(service: Service, call: Call, body: bytes) -> JSON:
    return JSON(service.book.view(_entry(service, call)))


async def request_trace(service: Service, call: Call, body: bytes) -> JSON:
    entry = _entry(service, call)
    return _attached(trace_of([entry], service.serving.engine.recent(), service.model), entry.id)


async def trace(service: Service, call: Call, body: bytes) -> JSON:
    """Every request that was on its way in the last so many seconds."""
    since = time.monotonic() - _number(call, "seconds", TRACED_S, 0.001, MOST_TRACED_S)
    entries = [entry for entry in service.book.entries() if not entry.ended or entry.ended >= since]
    return _attached(trace_of(entries, service.serving.engine.recent(), service.model), "recent")


async def model_view(service: Service, call: Call, body: bytes) -> JSON:
    await _look_at_machine(service)
    return JSON(model_card(service.serving, service.book.floors, service.config.model))


# -- what was asked -------------------------------------------------------------------------------


async def _look_at_machine(service: Service) -> None:
    await service.book.floors.look(idle=not service.open)


def _entry(service: Service, call: Call) -> Entry:
    id = call.scope["path_params"]["id"]
    entry = service.book.find(id)
    if entry is None:
        message = f"request {id[:128]!r} is not remembered; the last {REMEMBERED} are"
        raise Refusal(404, message, param="id", code="request_not_found")
    return entry


def _attached(document: object, name: str) -> JSON:
    return JSON(
        document, headers={"content-disposition": f'attachment; filename="cairn-{name}.json"'}
    )


def _query(call: Call, name: str, otherwise: str) -> str:
    query = parse_qs(call.scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
    return query.get(name, [otherwise])[-1]


def _number(call: Call, name: str, otherwise: float, least: float, most: float) -> float:
    text = _query(call, name, str(otherwise))
    kind = type(otherwise)
    try:
        value = msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        value = None
    if value is None or not least <= value <= most:
        expected = "a whole number" if kind is int else "a number"
        message = f"{name} is {text[:40]!r}; it has to be {expected} from {least:g} to {most:g}"
        raise Refusal(400, message, param=name)
    return value
