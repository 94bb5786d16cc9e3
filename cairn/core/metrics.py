"""Which numbers Cairn counts, and how Prometheus reads them.

    CATALOGUE   what there is to count: name, help, unit, labels, buckets (data, nothing else)
    Metrics     the counts of one process        .add / .set / .observe   --> .snapshot()
    merge       snapshots of several processes  --> one snapshot
    render      a snapshot                      --> Prometheus text

A name or a label that the catalogue does not have is a mistake in the program, and a ValueError.
There is no global registry: whoever counts is handed a Metrics. Knows no HTTP and no clock.
"""

import bisect
import math
import re
import threading
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from cairn.core.errors import did_you_mean

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_NAME = re.compile(r"[a-z][a-z0-9_]*")


class Metric(msgspec.Struct, frozen=True, kw_only=True):
    """What every metric declares; the name ends in its unit, as Prometheus asks."""

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
        if self.name.endswith("_total") != isinstance(self, Counter):
            raise ValueError(f"{self.name}: _total is the end of a counter's name and of no other")
        if "le" in self.labels:
            raise ValueError(f"{self.name}: the label 'le' belongs to the buckets of histograms")


class Counter(Metric, frozen=True, kw_only=True):
    """Only grows; in several processes the values add up."""


class Gauge(Metric, frozen=True, kw_only=True):
    """Goes up and down; `across` says what several processes have together."""

    across: Literal["sum", "max", "min"] = "sum"


class Histogram(Metric, frozen=True, kw_only=True):
    """How often a value fell below each of the bounds; +Inf is the last one without being named."""

    buckets: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.buckets) != sorted(set(self.buckets)) or not all(
            map(math.isfinite, self.buckets)
        ):
            raise ValueError(f"{self.name}: buckets must be finite and grow: {self.buckets}")


class Sample(msgspec.Struct, frozen=True):
    """The value of one metric under one set of labels."""

    name: str
    labels: tuple[str, ...]  # values, in the order of the declaration
    value: float  # the sum of what was observed, for a histogram
    counts: tuple[int, ...] = ()  # per bucket, not cumulative, +Inf last; histograms only


class Snapshot(msgspec.Struct, frozen=True):
    """Everything one or more processes have counted until now; crosses process boundaries."""

    samples: tuple[Sample, ...]


LATENCY_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

CATALOGUE: tuple[Metric, ...] = (
    Counter(
        name="cairn_prompt_tokens_total",
        help="Prompt tokens that were asked with, those found in the cache among them; each prompt once.",
        unit="tokens",
        labels=("model",),
    ),
    Counter(
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
    Counter(
        name="cairn_checkpoint_load_seconds_total",
        help="Time spent reading weights from disk to the device.",
        unit="seconds",
        labels=("model",),
    ),
    Counter(
        name="cairn_checkpoint_load_bytes_total",
        help="Bytes of weights that were read from disk.",
        unit="bytes",
        labels=("model",),
    ),
)

Key = tuple[str, tuple[str, ...]]
M = TypeVar("M", bound=Metric)


class Metrics:
    """The counts of one process. Any thread may count."""

    def __init__(self, catalogue: Sequence[Metric] = CATALOGUE) -> None:
        self._declared = _by_name(catalogue)
        self._lock = threading.Lock()
        self._values: dict[Key, float] = {}
        self._counts: dict[Key, list[int]] = {}
        for metric in catalogue:
            if not metric.labels:  # zero is known before anything happens, unless a label is open
                self._touch(metric, ())

    def add(self, name: str, amount: float = 1, /, **labels: str) -> None:
        """Makes a counter or a gauge larger; a gauge also smaller."""
        metric = self._declaration(name, Metric, "add to")
        if isinstance(metric, Histogram):
            raise ValueError(f"cannot add to {name}, it is a histogram")
        if isinstance(metric, Counter) and not amount >= 0:
            raise ValueError(f"{name} only grows, got {amount}")
        key = _key(metric, labels)
        with self._lock:
            self._touch(metric, key[1])
            self._values[key] += amount

    def set(self, name: str, value: float, /, **labels: str) -> None:
        """Says what a gauge stands at."""
        metric = self._declaration(name, Gauge, "set")
        key = _key(metric, labels)
        with self._lock:
            self._values[key] = value

    def observe(self, name: str, value: float, /, **labels: str) -> None:
        """Adds one value to a histogram."""
        metric = self._declaration(name, Histogram, "observe")
        if math.isnan(value):
            raise ValueError(f"{name}: nan falls into no bucket")
        key = _key(metric, labels)
        with self._lock:
            self._touch(metric, key[1])
            self._values[key] += value
            self._counts[key][bisect.bisect_left(metric.buckets, value)] += 1

    def snapshot(self) -> Snapshot:
        with self._lock:
            return Snapshot(
                tuple(
                    Sample(name, labels, value, tuple(self._counts.get((name, labels), ())))
                    for (name, labels), value in self._values.items()
                )
            )

    def render(self) -> str:
        """This process alone as Prometheus text."""
        return render(self.snapshot(), tuple(self._declared.values()))

    def _declaration(self, name: str, kind: type[M], verb: str) -> M:
        metric = _find(self._declared, name)
        if not isinstance(metric, kind):
            raise ValueError(f"cannot {verb} {name}, it is a {type(metric).__name__.lower()}")
        return metric

    def _touch(self, metric: Metric, labels: tuple[str, ...]) -> None:
        key = (metric.name, labels)
        if key not in self._values:
            self._values[key] = 0
            if isinstance(metric, Histogram):
                self._counts[key] = [0] * (len(metric.buckets) + 1)


def merge(snapshots: Iterable[Snapshot], catalogue: Sequence[Metric] = CATALOGUE) -> Snapshot:
    """What several processes have counted together: keep the last snapshot of each, merge those."""
    declared = _by_name(catalogue)
    merged: dict[Key, Sample] = {}
    for snapshot in snapshots:
        for sample in snapshot.samples:
            key = (sample.name, sample.labels)
            known = merged.get(key)
            metric = _find(declared, sample.name)
            merged[key] = sample if known is None else _together(metric, known, sample)
    return Snapshot(tuple(merged.values()))


def render(snapshot: Snapshot, catalogue: Sequence[Metric] = CATALOGUE) -> str:
    """Prometheus text, version 0.0.4; metrics in the order of the catalogue, labels sorted."""
    declared = _by_name(catalogue)
    samples: dict[str, list[Sample]] = {}
    for sample in snapshot.samples:
        samples.setdefault(_find(declared, sample.name).name, []).append(sample)
    lines = []
    for metric in catalogue:
        if metric.name in samples:
            lines.append(f"# HELP {metric.name} {_escape(metric.help)}")
            lines.append(f"# TYPE {metric.name} {type(metric).__name__.lower()}")
            for sample in sorted(samples[metric.name], key=lambda sample: sample.labels):
                lines += _lines(metric, sample)
    return "".join(f"{line}\n" for line in lines)


def _by_name(catalogue: Sequence[Metric]) -> dict[str, Metric]:
    declared = {metric.name: metric for metric in catalogue}
    if len(declared) < len(catalogue):
        raise ValueError("two metrics of the catalogue have the same name")
    return declared


def _find(declared: dict[str, Metric], name: str) -> Metric:
    if name not in declared:
        hint = did_you_mean(name, declared, otherwise="it is not in the catalogue")
        raise ValueError(f"unknown metric {name!r}: {hint}")
    return declared[name]


def _key(metric: Metric, labels: dict[str, str]) -> Key:
    for label in labels:
        if label not in metric.labels:
            known = ", ".join(metric.labels) or "it has none"
            hint = did_you_mean(label, metric.labels, otherwise=f"labels: {known}")
            raise ValueError(f"{metric.name} has no label {label!r}: {hint}")
    missing = [label for label in metric.labels if label not in labels]
    if missing:
        raise ValueError(f"{metric.name} needs the label {missing[0]!r}")
    return metric.name, tuple(str(labels[label]) for label in metric.labels)


def _together(metric: Metric, one: Sample, other: Sample) -> Sample:
    if len(one.counts) != len(other.counts):
        raise ValueError(f"{metric.name}: {len(one.counts)} and {len(other.counts)} buckets")
    if isinstance(metric, Gauge) and metric.across != "sum":
        value = (max if metric.across == "max" else min)(one.value, other.value)
    else:
        value = one.value + other.value
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Sample(one.name, one.labels, value, counts)


def _lines(metric: Metric, sample: Sample) -> list[str]:
    labels = dict(zip(metric.labels, sample.labels, strict=True))
    if not isinstance(metric, Histogram):
        return [f"{metric.name}{_braces(labels)} {_number(sample.value)}"]
    bounds = [*map(_number, metric.buckets), "+Inf"]
    lines, below = [], 0
    for bound, count in zip(bounds, sample.counts, strict=True):
        below += count
        lines.append(f"{metric.name}_bucket{_braces(labels | {'le': bound})} {below}")
    return [
        *lines,
        f"{metric.name}_sum{_braces(labels)} {_number(sample.value)}",
        f"{metric.name}_count{_braces(labels)} {below}",
    ]


def _braces(labels: dict[str, str]) -> str:
    quoted = [
        f'{name}="{_escape(value).replace(chr(34), chr(92) + chr(34))}"'
        for name, value in labels.items()
    ]
    return "{" + ",".join(quoted) + "}" if quoted else ""


def _escape(text: str) -> str:
    text = text.encode(errors="replace").decode()  # half a surrogate pair cannot be sent
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)
