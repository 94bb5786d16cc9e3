"""Requests as OpenTelemetry spans, seen by the SDK's own exporter."""

import builtins
import gzip
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import live_server
import pytest

from cairn.core.errors import ConfigError
from cairn.serve.http.ledger.otel import Traces, open_traces
from cairn.serve.http.server.settings import ServerConfig

memory = pytest.importorskip(
    "opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="needs cairn[otel]"
)
from opentelemetry.trace import SpanKind, StatusCode  # noqa: E402

BODY = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True}
PHASES = ["tokenize", "queue", "schedule", "prefill", "decode", "respond"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def seen(tiny_folder):
    """A server, and the spans it has sent."""
    with live_server.live(tiny_folder) as server:
        exporter = memory.InMemorySpanExporter()
        server.service.send_traces(Traces("tiny", exporter, at_once=True))
        yield server, exporter


def spans_of(seen, id):
    """The request's own span, and its children in order."""
    exporter, found = seen[1], []

    def whole():
        found[:] = [
            s for s in exporter.get_finished_spans() if s.attributes.get("cairn.request.id") == id
        ]
        return found

    live_server.wait_until(whole)
    (root,) = found
    children = [
        s
        for s in exporter.get_finished_spans()
        if s.parent and s.parent.span_id == root.context.span_id
    ]
    return root, sorted(children, key=lambda s: s.start_time)


def ask(seen, id, headers=(), **more):
    return seen[0].http.post(
        "/v1/completions", json={**BODY, **more}, headers={"x-request-id": id, **dict(headers)}
    )


def test_a_request_is_a_span_and_its_phases_are_children(seen):
    assert ask(seen, "whole").status_code == 200
    root, children = spans_of(seen, "whole")
    assert root.name == "POST /v1/completions"
    assert root.kind is SpanKind.SERVER
    assert root.parent is None
    assert [child.name for child in children] == PHASES
    assert children[0].start_time == root.start_time
    assert (
        abs(children[-1].end_time - root.end_time) < 1000
    )  # nanoseconds: floats of seconds since 1970
    for before, after in pairwise(children):
        assert abs(before.end_time - after.start_time) < 1000
    about = root.attributes
    assert about["gen_ai.usage.output_tokens"] == 4
    assert about["gen_ai.request.model"] == "tiny"
    assert about["gen_ai.server.time_to_first_token"] > 0
    assert "hello" not in str(dict(about))


def test_a_span_belongs_to_the_clients_trace(seen):
    ask(seen, "traced", {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    root, children = spans_of(seen, "traced")
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT
    assert {child.context.trace_id for child in children} == {root.context.trace_id}


def test_a_trace_that_is_not_sampled_is_not_sent(seen):
    ask(seen, "quiet", {"traceparent": f"00-{TRACE}-{PARENT}-00"})
    ask(seen, "loud")
    spans_of(seen, "loud")
    assert all(
        s.attributes.get("cairn.request.id") != "quiet" for s in seen[1].get_finished_spans()
    )


@pytest.mark.parametrize(
    "header", ["", "rubbish", "00-0-0-01", f"ff-{TRACE}-{PARENT}-01", "00-" + "0" * 32]
)
def test_a_header_that_is_no_trace_begins_one(seen, header):
    id = f"wrong-{len(header)}-{header[:2]}".rstrip("-")
    assert ask(seen, id, {"traceparent": header}).status_code == 200
    assert spans_of(seen, id)[0].parent is None


def test_a_request_that_fails_is_an_error(seen, monkeypatch):
    def broken(step):
        raise RuntimeError("no")

    monkeypatch.setattr(seen[0].engine.runner, "launch", broken)
    assert ask(seen, "failed").status_code == 503
    assert spans_of(seen, "failed")[0].status.status_code is StatusCode.ERROR


def test_without_the_package_asking_is_an_error(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("opentelemetry.exporter"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match="is not installed") as caught:
        open_traces("http://127.0.0.1:4318/v1/traces", "tiny")
    assert "cairn[otel]" in caught.value.hint


def test_an_address_is_checked_before_anything_is_loaded():
    with pytest.raises(ConfigError, match="otel_endpoint is localhost:4318"):
        ServerConfig(model="m", otel_endpoint="localhost:4318")


def test_a_collector_that_is_not_there_harms_nobody(tiny_folder):
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs cairn[otel]")
    with live_server.live(tiny_folder, otel_endpoint="http://127.0.0.1:9/v1/traces") as server:
        assert server.http.post("/v1/completions", json=BODY).status_code == 200
        live_server.wait_until(lambda: len(server.service.book) == 1)


def test_a_collector_has_everything_when_the_server_has_stopped(tiny_folder):
    """Real bytes over a real socket: OTLP in protobuf."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs cairn[otel]")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            got.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    collector = HTTPServer(("127.0.0.1", 0), Collector)
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        address = f"http://127.0.0.1:{collector.server_port}/v1/traces"
        with live_server.live(tiny_folder, otel_endpoint=address) as server:
            assert server.http.post("/v1/completions", json=BODY).status_code == 200
    finally:
        collector.shutdown()
        collector.server_close()
    assert {path for path, _ in got} == {"/v1/traces"}
    names = [
        span.name
        for _, sent in got
        for resource in sent.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert sorted(names) == sorted(["POST /v1/completions", *PHASES])
