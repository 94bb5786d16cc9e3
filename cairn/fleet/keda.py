"""KEDA asks how many servers there should be, and is answered by the policy that scales local processes.

    KEDA --IsActive, GetMetricSpec, GetMetrics--> scaler --router's waits, held and running requests--> scale.decide

The metric is the number of servers itself, with a target of 1 each, so that the HPA's arithmetic leaves it as it is.
A ScaledObject's metadata may have model, least, most, ttft_s, idle_s and start_s. Needs grpcio.
"""

import time
from typing import Any

import msgspec

from cairn.core.errors import ConfigError, did_you_mean
from cairn.core.protobuf_wire import WireError
from cairn.fleet.keda_messages import (
    ScaledObject,
    read_metrics_request,
    read_scaled_object,
    write_active,
    write_metric,
)
from cairn.fleet.listen import listen_grpc
from cairn.fleet.placement import wait_s, waiting_for
from cairn.fleet.router import Router
from cairn.fleet.scaling_policy import Rules, ScaledModel, Seen, decide

METRIC = "cairn-servers"
SERVICE = "externalscaler.ExternalScaler"
ROWS = 64  # of a server that has not told


class ScalerMetadata(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Metadata of a ScaledObject's trigger, as strings; KEDA adds scalerAddress."""

    model: str
    least: int = 0
    most: int = 1
    ttft_s: float = 2.0
    idle_s: float = 300.0
    start_s: float = 20.0
    scalerAddress: str = ""


class KedaScaler:
    def __init__(self, router: Router) -> None:
        self._router = router
        self._models: dict[str, ScaledModel] = {}
        self._had: dict[str, int] = {}  # servers of each, when KEDA asked last

    def is_active(self, asked: ScaledObject) -> bool:
        """Should there be any server?"""
        return self.servers(asked) > 0

    def servers(self, asked: ScaledObject) -> int:
        """Desired number of servers."""
        wanted = read_metadata(asked)
        model = self._model(wanted.model)
        model.ttft_s = wanted.ttft_s
        workers = [one for one in self._router.workers if _serves(one.hello, wanted.model)]
        up = [one for one in workers if one.state == "up"]
        now = time.monotonic()
        if self._had.setdefault(wanted.model, len(workers)) != len(workers):
            model.meter.changed_s = now
        self._had[wanted.model] = len(workers)
        seen: Seen = model.meter.seen(
            now,
            ready=len(up),
            starting=sum(one.state == "starting" for one in workers),
            held=waiting_for(self._router, model),
            in_flight=sum(one.waiting + one.decoding for one in workers),
            wait_s=wait_s(self._router, model, up),
        )
        rules = Rules(
            least=wanted.least,
            most=wanted.most,
            rows=min((one.hello.rows for one in up if one.hello), default=ROWS),
            ttft_s=wanted.ttft_s,
            start_s=wanted.start_s,
            idle_s=wanted.idle_s,
        )
        return decide(seen, rules)

    def _model(self, name: str) -> ScaledModel:
        """Metered from the first question on; its requests are held while there is no server."""
        if name not in self._models:
            made = ScaledModel([name], time.monotonic(), first=not self._router.scaled)
            self._models[name] = made
            self._router.scaled.append(made)
        return self._models[name]


def _serves(hello: Any, model: str) -> bool:
    return hello is None or model in hello.models


def read_metadata(asked: ScaledObject) -> ScalerMetadata:
    known = ScalerMetadata.__struct_fields__
    for key in asked.metadata:
        if key not in known:
            near = did_you_mean(key, known, otherwise=f"known: {', '.join(known)}")
            raise ConfigError(f"metadata of {asked.name} has {key!r}", hint=near)
    try:
        return msgspec.convert(asked.metadata, ScalerMetadata, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"metadata of {asked.name}: {error}") from None


async def start_keda(router: Router, address: str) -> tuple[Any, int]:
    """The gRPC server, in this event loop, and its port."""
    try:
        import grpc
    except ImportError:
        hint = "pip install 'cairn-stack[keda]'"
        raise ConfigError("an external scaler of KEDA needs grpcio", hint=hint) from None
    scaler = KedaScaler(router)

    async def answer(data: bytes, context: Any, read: Any, write: Any) -> bytes:
        try:
            return write(read(data))
        except (ConfigError, WireError) as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            raise

    async def is_active(data: bytes, context: Any) -> bytes:
        def write(one: ScaledObject) -> bytes:
            return write_active(scaler.is_active(one))

        return await answer(data, context, read_scaled_object, write)

    async def metric_spec(data: bytes, context: Any) -> bytes:
        def write(one: ScaledObject) -> bytes:
            read_metadata(one)
            return write_metric(METRIC, 1)

        return await answer(data, context, read_scaled_object, write)

    async def metrics(data: bytes, context: Any) -> bytes:
        def write(one: ScaledObject) -> bytes:
            return write_metric(METRIC, scaler.servers(one))

        return await answer(data, context, read_metrics_request, write)

    methods = {"IsActive": is_active, "GetMetricSpec": metric_spec, "GetMetrics": metrics}
    handlers = {name: grpc.unary_unary_rpc_method_handler(one) for name, one in methods.items()}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = listen_grpc(server, address)
    await server.start()
    return server, port
