"""Metrics and their exposition in Prometheus's text format.

    CATALOGUE   what there is to count: name, help, unit, labels, buckets (data, nothing else)
    Metrics     the counts of one process, kept by prometheus_client:  .add / .set / .observe  --> .render()

A name or a label that the catalogue does not have is a mistake in the program, and a ValueError.
There is no global registry: code that counts is handed a Metrics. Knows no HTTP and no clock.
"""

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import msgspec

from cairn.core.errors import did_you_mean

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class MetricSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Declaration of a metric. The name ends in its unit, as Prometheus recommends."""

    name: str
    help: str
    unit: str
    labels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for word in (self.name, self.unit, *self.labels):
            if not _NAME.fullmatch(word):
                raise ValueError(f"{self.name}: {word!r} is not a name")
        if not self.name.removesuffix("_total").endswith(f"_{self.unit}"):
            raise ValueError(f"{self.name} does not end in its unit, {self.unit}")
        if self.name.endswith("_total") != isinstance(self, CounterMetric):
            raise ValueError(f"{self.name}: _total is the end of a counter's name and of no other")
        if "le" in self.labels:
            raise ValueError(f"{self.name}: the label 'le' belongs to the buckets of histograms")


class CounterMetric(MetricSpec, frozen=True, kw_only=True):
    """Only grows."""


class Gauge(MetricSpec, frozen=True, kw_only=True):
    """Goes up and down; `across` says how a dashboard adds several processes up."""

    across: Literal["sum", "max", "min"] = "sum"


class Histogram(MetricSpec, frozen=True, kw_only=True):
    """Histogram with cumulative buckets; the last bound, +Inf, is implicit."""

    buckets: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.buckets) != sorted(set(self.buckets)) or not all(
            map(math.isfinite, self.buckets)
        ):
            raise ValueError(f"{self.name}: buckets must be finite and grow: {self.buckets}")


LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

CATALOGUE: tuple[MetricSpec, ...] = (
    CounterMetric(
        name="cairn_prompt_tokens_total",
        help="Prompt tokens that were asked with, those found in the cache among them; each prompt once.",
        unit="tokens",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_generated_tokens_total",
        help="Tokens that were generated.",
        unit="tokens",
        labels=("model",),
    ),
    Histogram(
        name="cairn_time_to_first_token_seconds",
        help="From the request to its first generated token.",
        unit="seconds",
        labels=("model",),
        buckets=LATENCY_SECONDS,
    ),
    Histogram(
        name="cairn_time_per_output_token_seconds",
        help="Between two generated tokens, averaged over one answer from its own first token on.",
        unit="seconds",
        labels=("model",),
        buckets=LATENCY_SECONDS,
    ),
    CounterMetric(
        name="cairn_checkpoint_load_seconds_total",
        help="Time spent reading weights from disk to the device.",
        unit="seconds",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_checkpoint_load_bytes_total",
        help="Bytes of weights that were read from disk.",
        unit="bytes",
        labels=("model",),
    ),
)

M = TypeVar("M", bound=MetricSpec)


class Metrics:
    """The counts of one process, in a prometheus_client registry of its own. Any thread may count."""

    def __init__(self, catalogue: Sequence[MetricSpec] = CATALOGUE) -> None:
        import prometheus_client as prometheus  # only processes that count need it

        prometheus.disable_created_metrics()
        self._declared = {metric.name: metric for metric in catalogue}
        if len(self._declared) < len(catalogue):
            raise ValueError("two metrics of the catalogue have the same name")
        self.registry = prometheus.CollectorRegistry()
        kinds: dict[type[MetricSpec], Any] = {
            CounterMetric: prometheus.Counter,
            Gauge: prometheus.Gauge,
            Histogram: prometheus.Histogram,
        }
        self._collectors: dict[str, Any] = {}
        for metric in catalogue:
            options = {"buckets": metric.buckets} if isinstance(metric, Histogram) else {}
            self._collectors[metric.name] = kinds[type(metric)](
                metric.name, metric.help, metric.labels, registry=self.registry, **options
            )

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Makes a counter or a gauge larger; a gauge also smaller."""
        metric = self._declaration(name, MetricSpec, "add to")
        if isinstance(metric, Histogram):
            raise ValueError(f"cannot add to {name}, it is a histogram")
        if isinstance(metric, CounterMetric) and not amount >= 0:
            raise ValueError(f"{name} only grows, got {amount}")
        self._child(metric, labels).inc(amount)

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Says what a gauge stands at."""
        self._child(self._declaration(name, Gauge, "set"), labels).set(value)

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Adds one value to a histogram."""
        metric = self._declaration(name, Histogram, "observe")
        if math.isnan(value):
            raise ValueError(f"{name}: nan falls into no bucket")
        self._child(metric, labels).observe(value)

    def value(self, sample: str, /, **labels: str) -> float | None:
        """The value of one sample; None if it does not exist."""
        return self.registry.get_sample_value(sample, labels)

    def render(self) -> str:
        """Prometheus text, version 0.0.4."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def _declaration(self, name: str, kind: type[M], verb: str) -> M:
        if name not in self._declared:
            hint = did_you_mean(name, self._declared, otherwise="it is not in the catalogue")
            raise ValueError(f"unknown metric {name!r}: {hint}")
        metric = self._declared[name]
        if not isinstance(metric, kind):
            raise ValueError(f"cannot {verb} {name}, it is a {type(metric).__name__.lower()}")
        return metric

    def _child(self, metric: MetricSpec, labels: dict[str, str]) -> Any:
        """The child metric for these labels."""
        for label in labels:
            if label not in metric.labels:
                known = ", ".join(metric.labels) or "it has none"
                hint = did_you_mean(label, metric.labels, otherwise=f"labels: {known}")
                raise ValueError(f"{metric.name} has no label {label!r}: {hint}")
        missing = [label for label in metric.labels if label not in labels]
        if missing:
            raise ValueError(f"{metric.name} needs the label {missing[0]!r}")
        collector = self._collectors[metric.name]
        return (
            collector.labels(**{k: _sendable(v) for k, v in labels.items()})
            if labels
            else collector
        )


def _sendable(label: str) -> str:
    """Half of a surrogate pair cannot be encoded."""
    return str(label).encode(errors="replace").decode()
