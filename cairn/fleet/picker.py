"""An endpoint picker of a Kubernetes gateway: Envoy asks where a request goes, and the router's policy answers.

    Envoy --headers, whole body--> picker --x-gateway-destination-endpoint: HOST:PORT--> Envoy --> server

As the Gateway API's inference extension has it, for an InferencePool. The router knows caches and loads as for its own
requests; bytes of answers never come here. While no server is up or has room, Envoy waits for its answer. Needs grpcio.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.protobuf_wire import WireError
from cairn.fleet.downstream import error_body
from cairn.fleet.listen import listen_grpc
from cairn.fleet.picker_messages import (
    Kind,
    Processing,
    read_processing,
    write_continue,
    write_refusal,
)
from cairn.fleet.refusals import unknown_model, why_nobody
from cairn.fleet.router import NO_FIELDS, NO_KEYS, Router
from cairn.fleet.worker import Worker
from cairn.serve.text_keys import prompt_keys, read_fields

METHOD = ("envoy.service.ext_proc.v3.ExternalProcessor", "Process")


class RequestStream:
    """A request of Envoy, counted on the server it was sent to."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._worker: Worker | None = None
        self._tokens, self._first = 0, True
        self._body = bytearray()  # so far

    async def answer(self, message: Processing) -> bytes:
        if message.kind == "request_headers" and not message.ends:
            return write_continue("request_headers")  # the body says where to
        if message.kind in ("request_headers", "request_body"):
            return await self._collect(message)
        if message.kind == "response_headers":
            self._began()
        return write_continue(message.kind)

    async def _collect(self, message: Processing) -> bytes:
        """Picks once, when the body has come whole."""
        self._body += message.body
        most = self._router.config.max_body_bytes
        if len(self._body) > most:
            said = f"the body has more than {most} bytes"
            return write_refusal(413, error_body(413, said, "body_too_large")[1])
        return await self._pick(message.kind) if message.ends else write_continue(message.kind)

    async def _pick(self, kind: Kind) -> bytes:
        data = bytes(self._body)
        try:
            body = read_fields(data) if data else NO_FIELDS
        except msgspec.MsgspecError:
            body = NO_FIELDS  # the server's to refuse
        router = self._router
        workers = await self._eligible(body.model)
        now = time.monotonic()
        if not workers:
            unknown = unknown_model(router, body.model, aliases=False)
            status, code = (404, "model_not_found") if unknown else (503, "no_server")
            _, said = error_body(status, unknown or why_nobody(router, body.model, now), code)
            return write_refusal(status, said)
        keys = prompt_keys(body) if data else NO_KEYS
        ask = router.ask(router.next_number(), keys, body.wanted_tokens, now, bool(data))
        choice, self._tokens = router.choose(ask, keys, workers, now)
        router.note_sent(ask, keys, choice, now)
        self._worker = worker = choice.chosen
        router.meter(body.model, now, self._tokens * worker.token_s)
        worker.takes(self._tokens, streams=False)
        return write_continue(kind, f"{worker.host}:{worker.port}")

    async def _eligible(self, model: str | None) -> list[Worker]:
        """Servers that may get it; while there is none it waits, as long as the router's own requests do."""
        router, now = self._router, time.monotonic()
        ends = now + router.config.hold_s
        if (workers := router.eligible(now, model)) or unknown_model(router, model) is not None:
            return workers
        router.meter(model, now, 0.0)
        if router.on_waiting is not None:
            router.on_waiting()
        changed = asyncio.Event()
        router.picking[changed] = model
        try:
            while not workers and now < ends:
                await changed.wait()
                changed.clear()
                now = time.monotonic()
                workers = router.eligible(now, model)
        finally:
            del router.picking[changed]
        return workers

    def _began(self) -> None:
        """The server answers."""
        if self._worker is not None and self._first:
            self._first = False
            self._worker.computed(self._tokens, streams=False)
            self._worker.decoding += 1

    def ended(self) -> None:
        self._began()
        if self._worker is not None:
            self._worker.decoding -= 1


async def start_picker(router: Router, address: str) -> tuple[Any, int]:
    """The gRPC server, in this event loop, and its port."""
    try:
        import grpc
    except ImportError:
        hint = "pip install 'cairn-stack[gateway]'"
        raise ConfigError("an endpoint picker needs grpcio", hint=hint) from None

    async def process(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        picked = RequestStream(router)
        try:
            async for data in messages:
                message = read_processing(data)
                if message is not None:
                    yield await picked.answer(message)
        except WireError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            picked.ended()

    service, name = METHOD
    handlers = {name: grpc.stream_stream_rpc_method_handler(process)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = listen_grpc(server, address)
    await server.start()
    return server, port
