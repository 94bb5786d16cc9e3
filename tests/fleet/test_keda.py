"""KEDA's external scaler: its messages against protobuf's own, its answers over real gRPC."""

import asyncio
import contextlib

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.core.protobuf_wire import WireError
from cairn.fleet.config import RouterConfig
from cairn.fleet.keda import KedaScaler, start_keda
from cairn.fleet.keda_messages import (
    ScaledObject,
    read_metrics_request,
    read_scaled_object,
    write_active,
    write_metric,
)
from cairn.fleet.router import Router
from cairn.fleet.worker import Worker
from cairn.serve.pulse import Hello


def _messages():
    """As externalscaler.proto names and numbers them."""
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="scaler.proto", syntax="proto3", package="x")

    def message(name, *fields, into=file.message_type):
        made = into.add(name=name)
        for number, (field, kind, repeated, type_name) in enumerate(fields, start=1):
            label = kinds.LABEL_REPEATED if repeated else kinds.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=kind, label=label, type_name=type_name)
        return made

    text, number, flag, inner = (
        kinds.TYPE_STRING,
        kinds.TYPE_INT64,
        kinds.TYPE_BOOL,
        kinds.TYPE_MESSAGE,
    )
    ref = message(
        "ScaledObjectRef",
        ("name", text, False, None),
        ("namespace", text, False, None),
        ("scalerMetadata", inner, True, ".x.ScaledObjectRef.Entry"),
    )
    entry = message(
        "Entry", ("key", text, False, None), ("value", text, False, None), into=ref.nested_type
    )
    entry.options.map_entry = True
    message("IsActiveResponse", ("result", flag, False, None))
    message("Metric", ("metricName", text, False, None), ("metricValue", number, False, None))
    message("GetMetricsResponse", ("metricValues", inner, True, ".x.Metric"))
    message(
        "GetMetricsRequest",
        ("scaledObjectRef", inner, False, ".x.ScaledObjectRef"),
        ("metricName", text, False, None),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    names = ("ScaledObjectRef", "IsActiveResponse", "GetMetricsResponse", "GetMetricsRequest")
    found = [pool.FindMessageTypeByName(f"x.{name}") for name in names]
    return [message_factory.GetMessageClass(one) for one in found]


REF, ACTIVE, METRICS, ASKED = _messages()


@given(st.text(), st.text(), st.dictionaries(st.text(), st.text(), max_size=4), st.text())
def test_requests_are_read_as_protobuf_writes_them(name, namespace, metadata, metric):
    ref = REF(name=name, namespace=namespace, scalerMetadata=metadata)
    wanted = ScaledObject(name, namespace, metadata)
    assert read_scaled_object(ref.SerializeToString()) == wanted
    asked = ASKED(scaledObjectRef=ref, metricName=metric)
    assert read_metrics_request(asked.SerializeToString()) == wanted


@given(st.booleans(), st.text(), st.integers(0, 2**62))
def test_answers_are_read_by_protobuf(active, name, value):
    assert ACTIVE.FromString(write_active(active)).result == active
    (found,) = METRICS.FromString(write_metric(name, value)).metricValues
    assert (found.metricName, found.metricValue) == (name, value)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_message_or_refused(data):
    with contextlib.suppress(WireError):
        read_scaled_object(data)


METADATA = {"model": "m", "least": "0", "most": "4", "idle_s": "60", "scalerAddress": "x:1"}


def test_a_busy_fleet_grows_and_an_idle_one_keeps_what_it_has():
    router = Router(RouterConfig(), [])
    scaler, ref = KedaScaler(router), ScaledObject("one", "two", METADATA)
    assert not scaler.is_active(ref)
    worker = Worker(0, "http://127.0.0.1:1")
    worker.up(Hello(1, ["m"], 16, True, 8))
    router.workers.append(worker)
    assert scaler.servers(ref) == 1
    worker.decoding = 20  # of 8 rows
    assert scaler.servers(ref) == 4
    with pytest.raises(ConfigError, match="metadata of one has 'mots'"):
        scaler.servers(ScaledObject("one", "two", {"model": "m", "mots": "4"}))
    with pytest.raises(ConfigError, match="required field `model`"):
        scaler.servers(ScaledObject("one"))


def test_a_fleet_that_is_too_large_stays_so_only_until_keda_has_acted(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("cairn.fleet.keda.time.monotonic", lambda: now[0])
    router = Router(RouterConfig(), [])
    metadata = {**METADATA, "idle_s": "1e9"}
    scaler, ref = KedaScaler(router), ScaledObject("one", "two", metadata)
    for number in range(3):
        worker = Worker(number, f"http://127.0.0.1:{number + 1}")
        worker.up(Hello(1, ["m"], 16, True, 8))
        router.workers.append(worker)
    for _ in range(3):  # the HPA takes the largest of several answers
        assert scaler.servers(ref) == 2
        now[0] += 15
    router.workers.pop()
    assert scaler.servers(ref) == 2  # it has just become smaller
    now[0] += 60
    assert scaler.servers(ref) == 1
    router.workers[1].down("gone")  # starts nothing
    router.workers[0].decoding = 20
    assert scaler.servers(ref) == 4
    router.workers[0].decoding, router.workers[0].queued_tokens = 1, 10**9
    assert scaler.servers(ref) == 2


def test_keda_asks_over_grpc():
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed")

    async def check() -> None:
        router = Router(RouterConfig(), [])
        worker = Worker(0, "http://127.0.0.1:1")
        worker.up(Hello(1, ["m"], 16, True, 8))
        worker.decoding = 20
        router.workers.append(worker)
        server, port = await start_keda(router, "127.0.0.1:0")
        ref = REF(name="one", scalerMetadata=METADATA)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def call(name, asked):
                method = channel.unary_unary(f"/externalscaler.ExternalScaler/{name}")
                return await method(asked.SerializeToString())

            assert ACTIVE.FromString(await call("IsActive", ref)).result
            (spec,) = METRICS.FromString(await call("GetMetricSpec", ref)).metricValues
            assert (spec.metricName, spec.metricValue) == ("cairn-servers", 1)
            asked = ASKED(scaledObjectRef=ref, metricName="cairn-servers")
            (value,) = METRICS.FromString(await call("GetMetrics", asked)).metricValues
            assert value.metricValue == 4
            with pytest.raises(grpc.aio.AioRpcError, match="required field `model`"):
                await call("GetMetrics", ASKED())
        await server.stop(None)

    asyncio.run(check())
