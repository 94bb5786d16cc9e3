"""Requests as OpenTelemetry spans: one for each, with its phases as children; sent to a collector behind the answers.

    POST /v1/chat/completions            SERVER, from the body to the last byte; part of the client's trace (W3C
      tokenize queue schedule prefill decode respond                         traceparent), if it has begun one

Made from the ledger when a request has settled, so that nothing is measured twice and nothing is done while it runs.
Names of attributes are those of OpenTelemetry's conventions for generative AI where there is one. An optional extra:
without the packages, asking for it is an error, and nothing else changes.
"""

from typing import TYPE_CHECKING, Any

from cairn import __version__
from cairn.core.errors import ConfigError
from cairn.serve.http.ledger.entry import Entry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

NANO = 1_000_000_000
FAILED = ("error", "deadline")
SEND_S = 3.0  # for a batch, tries again included; a server that stops waits for the last one
OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
}


class Traces:
    """Span exporter. `tell` is called in the event loop's thread and only queues spans."""

    def __init__(self, model: str, exporter: "SpanExporter", *, at_once: bool = False) -> None:
        """`at_once`: without a thread and a line, for tests."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

        about = {"service.name": "cairn", "service.version": __version__}
        self._model = model
        self._provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        way = SimpleSpanProcessor(exporter) if at_once else BatchSpanProcessor(exporter)
        self._provider.add_span_processor(way)
        self._tracer = self._provider.get_tracer("cairn.serve", __version__)

    def tell(self, entry: Entry) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        def moment(at: float) -> int:
            return round((entry.began + at - entry.arrived) * NANO)

        span = self._tracer.start_span(
            f"POST {entry.endpoint}",
            _context(entry.parent),
            SpanKind.SERVER,
            attributes=self._about(entry),
            start_time=moment(entry.arrived),
        )
        if entry.status in FAILED:
            span.set_status(Status(StatusCode.ERROR, entry.status))
        inside = set_span_in_context(span)
        for part in entry.parts():
            if part.summed:
                span.set_attribute(f"cairn.{part.name}.seconds", part.seconds)
                continue
            child = self._tracer.start_span(part.name, inside, start_time=moment(part.start))
            child.end(moment(part.start + part.seconds))
        span.end(moment(entry.ended))

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()

    def _about(self, entry: Entry) -> dict[str, Any]:
        attributes: dict[str, Any] = {
            "http.request.method": "POST",
            "url.path": entry.endpoint,
            "gen_ai.operation.name": OPERATIONS.get(entry.endpoint, "text_completion"),
            "gen_ai.request.model": self._model,
            "gen_ai.response.finish_reasons": (entry.status,),
            "gen_ai.usage.input_tokens": entry.prompt,
            "gen_ai.usage.output_tokens": entry.outputs,
            "cairn.request.id": entry.id,
            "cairn.cached_tokens": entry.cached,
            "cairn.preemptions": entry.ledger.preemptions,
            "cairn.answers": entry.answers,
        }
        if entry.to_first is not None:
            attributes["gen_ai.server.time_to_first_token"] = entry.to_first
        if entry.per_token is not None:
            attributes["gen_ai.server.time_per_output_token"] = entry.per_token
        return attributes


def open_traces(endpoint: str, model: str) -> Traces:
    """Export to an OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"otel_endpoint is {endpoint}, and the package {error.name} is not installed",
            hint="pip install 'cairn[otel]', or leave --otel-endpoint out",
        ) from None
    return Traces(model, OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S))


def _context(parent: str | None) -> Any:
    """The client's trace; of a header that is not one, nothing."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if parent is None:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())
