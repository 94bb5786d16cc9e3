"""Prometheus metrics of the server, from its engine and its requests; `metric_catalogue` has the
metrics themselves."""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cairn.core.metrics import LATENCY_SECONDS, Metrics
from cairn.serve.engine.messages import Stats
from cairn.serve.http.server.metric_catalogue import CATALOGUE_HTTP

if TYPE_CHECKING:
    from cairn.serve.http.ledger.entry import Entry

# Totals of `Stats` that only grow while an engine lives, and the counters that show them.
GROWING: tuple[tuple[str, str, dict[str, str]], ...] = (
    ("preempted", "cairn_preempted_requests_total", {}),
    ("prefix_tokens", "cairn_prefix_looked_up_tokens_total", {}),
    ("prefix_hits", "cairn_prefix_found_tokens_total", {}),
    ("remote_prefills", "cairn_remote_prompts_total", {}),
    ("prefill_fallbacks", "cairn_fallback_prompts_total", {}),
    ("host_tokens", "cairn_offload_loaded_tokens_total", {"tier": "host"}),
    ("disk_tokens", "cairn_offload_loaded_tokens_total", {"tier": "disk"}),
    ("failed_loads", "cairn_offload_failed_loads_total", {}),
    ("pictures", "cairn_media_pictures_total", {"rows": "computed"}),
    ("pictures_found", "cairn_media_pictures_total", {"rows": "found"}),
    ("tower_s", "cairn_media_tower_seconds_total", {}),
    ("draft_runs", "cairn_spec_decode_num_drafts_total", {}),
    ("drafted", "cairn_spec_decode_num_draft_tokens_total", {}),
    ("accepted", "cairn_spec_decode_num_accepted_tokens_total", {}),
    ("host_s", "cairn_engine_seconds_total", {"part": "host"}),
    ("device_s", "cairn_engine_seconds_total", {"part": "device"}),
)
GAPS = "cairn_inter_token_seconds"
RECENT = 4096  # times between tokens, for percentiles


def server_metrics(model: str, gaps: "Gaps") -> Metrics:
    """Create the metrics with zero values, so that rates are defined from the first request on."""
    metrics = Metrics([metric for metric in CATALOGUE_HTTP if metric.name != GAPS])
    metrics.registry.register(gaps)
    for name in ("cairn_prompt_tokens_total", "cairn_generated_tokens_total"):
        metrics.add(name, 0, model=model)
    return metrics


class Gaps(Collector):
    """The times between tokens. Counted here without a lock, because there is one for every token of every answer."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._counts = [0] * (len(LATENCY_SECONDS) + 1)
        self._sum = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def add(self, seconds: float) -> None:
        self.recent.append(seconds)
        self._counts[bisect_left(LATENCY_SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Collect the histogram with cumulative buckets for the registry."""
        help = next(metric.help for metric in CATALOGUE_HTTP if metric.name == GAPS)
        family = HistogramMetricFamily(GAPS, help, labels=["model"])
        bounds = [*(str(float(bound)) for bound in LATENCY_SECONDS), "+Inf"]
        below = zip(bounds, accumulate(self._counts), strict=True)
        family.add_metric([self._model], [(bound, float(n)) for bound, n in below], self._sum)
        yield family


def show_engine(
    metrics: Metrics, model: str, stats: Stats, open_requests: int, weights_bytes: int = 0
) -> None:
    metrics.set("cairn_running_requests", stats.running, model=model)
    metrics.set("cairn_waiting_requests", stats.waiting, model=model)
    metrics.set("cairn_open_requests", open_requests, model=model)
    metrics.set("cairn_cache_used_pages", stats.pages_used, model=model)
    if len(stats.groups_used) > 1:
        for group, used in enumerate(stats.groups_used):
            metrics.set("cairn_cache_group_used_pages", used, model=model, group=str(group))
    metrics.set("cairn_cache_pages", stats.pages, model=model)
    metrics.set("cairn_cache_findable_pages", stats.pages_cached, model=model)
    metrics.set("cairn_offload_pages", stats.host_pages, model=model, tier="host")
    metrics.set("cairn_offload_pages", stats.disk_pages, model=model, tier="disk")
    metrics.set("cairn_weights_bytes", weights_bytes, model=model)
    metrics.set("cairn_engine_steps", stats.steps, model=model)


class EngineTotals:
    """Totals of the engine as counters: those of an engine that was started again are added to what was before."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._last = Stats()

    def count(self, metrics: Metrics, stats: Stats) -> None:
        names = ["steps", *(name for name, _, _ in GROWING)]
        if any(getattr(stats, name) < getattr(self._last, name) for name in names):
            self._last = Stats()
        last, self._last = self._last, stats
        for name, metric, labels in GROWING:
            grown = getattr(stats, name) - getattr(last, name)
            metrics.add(metric, grown, model=self._model, **labels)
        for position, accepted in enumerate(stats.accepted_at):
            before = last.accepted_at[position] if position < len(last.accepted_at) else 0
            metrics.add(
                "cairn_spec_decode_num_accepted_tokens_per_pos_total",
                accepted - before,
                model=self._model,
                position=str(position),
            )


def count_parts(metrics: Metrics, model: str, entry: "Entry") -> None:
    """The phases of a request that has ended."""
    for part in entry.parts():
        metrics.observe("cairn_request_phase_seconds", part.seconds, model=model, phase=part.name)
