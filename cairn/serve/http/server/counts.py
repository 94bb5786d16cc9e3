"""What the server counts for Prometheus, beyond what every part of Cairn counts. Data, and the numbers of one engine.

Times are seen from the server: from the body of a request to what was handed to its socket.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from cairn.core.metrics import (
    CATALOGUE,
    LATENCY_SECONDS,
    Counter,
    Gauge,
    Histogram,
    Metric,
    Metrics,
)
from cairn.serve.engine.messages import Stats

if TYPE_CHECKING:
    from cairn.serve.http.ledger.entry import Entry

GROWING = (
    "steps",
    "preempted",
    "prefix_tokens",
    "prefix_hits",
    "host_s",
    "device_s",
    "remote_prefills",
    "prefill_fallbacks",
    "drafted",
    "accepted",
    "draft_runs",
    "host_tokens",
    "disk_tokens",
    "failed_loads",
    "pictures",
    "pictures_found",
    "tower_s",
)  # of `Stats`
RECENT = 4096  # times between tokens, for percentiles
CATALOGUE_HTTP: tuple[Metric, ...] = (
    *CATALOGUE,
    Counter(
        name="cairn_http_requests_total",
        help="Requests that were answered.",
        unit="requests",
        labels=("endpoint", "status"),
    ),
    Counter(
        name="cairn_finished_requests_total",
        help="Answers that ended, by the reason.",
        unit="requests",
        labels=("model", "reason"),
    ),
    Counter(
        name="cairn_cached_prompt_tokens_total",
        help="Prompt tokens that were found in the prefix cache by the first answer to a prompt.",
        unit="tokens",
        labels=("model",),
    ),
    Histogram(
        name="cairn_inter_token_seconds",
        help="Between two pieces of a streamed answer.",
        unit="seconds",
        labels=("model",),
        buckets=LATENCY_SECONDS,
    ),
    Histogram(
        name="cairn_request_seconds",
        help="From the body of a request to the end of its answer.",
        unit="seconds",
        labels=("model",),
        buckets=(*LATENCY_SECONDS, 120, 300, 600),
    ),
    Histogram(
        name="cairn_request_phase_seconds",
        help="Where the time of requests went: tokenize, queue, schedule, prefill, decode and respond follow one "
        "another; media, kv_allocation, detokenize and stream are sums inside them.",
        unit="seconds",
        labels=("model", "phase"),
        buckets=(0.0001, *LATENCY_SECONDS, 120, 300, 600),
    ),
    Counter(
        name="cairn_preempted_requests_total",
        help="Requests that lost their place in the batch, because the cache was full.",
        unit="requests",
        labels=("model",),
    ),
    Counter(
        name="cairn_prefix_looked_up_tokens_total",
        help="Prompt tokens that were looked for in the prefix cache.",
        unit="tokens",
        labels=("model",),
    ),
    Counter(
        name="cairn_prefix_found_tokens_total",
        help="Prompt tokens that were found there.",
        unit="tokens",
        labels=("model",),
    ),
    Counter(
        name="cairn_engine_seconds_total",
        help="Time of the engine's steps: of the host, deciding and taking in; of the device, computing.",
        unit="seconds",
        labels=("model", "part"),
    ),
    Counter(
        name="cairn_key_tokens_total",
        help="Tokens of requests that ended, by API key: prompt, cached (of the prompt), output.",
        unit="tokens",
        labels=("model", "key", "kind"),
    ),
    Counter(
        name="cairn_key_device_seconds_total",
        help="Time of the device, shared among the requests of each second by their tokens.",
        unit="seconds",
        labels=("model", "key"),
    ),
    Counter(
        name="cairn_key_joules_total",
        help="Energy of the GPU, shared in the same way; 0 where the device has no counter.",
        unit="joules",
        labels=("model", "key"),
    ),
    Gauge(
        name="cairn_event_loop_lag_seconds",
        help="How late the server's event loop ran at worst in the last ten seconds.",
        unit="seconds",
        labels=("model",),
    ),
    Counter(
        name="cairn_remote_prompts_total",
        help="Prompts that a prefill server computed.",
        unit="prompts",
        labels=("model",),
    ),
    Counter(
        name="cairn_fallback_prompts_total",
        help="Prompts that a prefill server was asked for, and that were computed here instead.",
        unit="prompts",
        labels=("model",),
    ),
    Counter(
        name="cairn_offload_loaded_tokens_total",
        help="Prompt tokens whose pages were loaded from a tier of the cache: host or disk.",
        unit="tokens",
        labels=("model", "tier"),
    ),
    Counter(
        name="cairn_offload_failed_loads_total",
        help="Loads that failed because a page on the disk was damaged; their prompts were computed.",
        unit="loads",
        labels=("model",),
    ),
    Gauge(
        name="cairn_offload_pages",
        help="Pages of the cache that a tier beyond the device holds: host or disk.",
        unit="pages",
        labels=("model", "tier"),
    ),
    Counter(
        name="cairn_media_pictures_total",
        help="Pictures of requests: computed by the tower, or found in its rows.",
        unit="pictures",
        labels=("model", "rows"),
    ),
    Counter(
        name="cairn_media_tower_seconds_total",
        help="Seconds that the engine spent on the tower; on a GPU, on launching it.",
        unit="seconds",
        labels=("model",),
    ),
    Counter(
        name="cairn_spec_decode_num_drafts_total",
        help="Times that drafts of a request were verified.",
        unit="drafts",
        labels=("model",),
    ),
    Counter(
        name="cairn_spec_decode_num_accepted_tokens_per_pos_total",
        help="Drafts that were accepted, by their position behind the last token.",
        unit="tokens_per_pos",
        labels=("model", "position"),
    ),
    Counter(
        name="cairn_spec_decode_num_draft_tokens_total",
        help="Tokens that a drafter proposed and a step verified.",
        unit="tokens",
        labels=("model",),
    ),
    Counter(
        name="cairn_spec_decode_num_accepted_tokens_total",
        help="Of those, the tokens that were accepted.",
        unit="tokens",
        labels=("model",),
    ),
    Gauge(
        name="cairn_running_requests",
        help="Requests in the batch of the engine.",
        unit="requests",
        labels=("model",),
    ),
    Gauge(
        name="cairn_waiting_requests",
        help="Requests that wait for the engine.",
        unit="requests",
        labels=("model",),
    ),
    Gauge(
        name="cairn_open_requests",
        help="Answers that were admitted and have not ended.",
        unit="requests",
        labels=("model",),
    ),
    Gauge(
        name="cairn_cache_used_pages",
        help="Pages of the cache that requests hold.",
        unit="pages",
        labels=("model",),
    ),
    Gauge(
        name="cairn_cache_group_used_pages",
        help="Pages of the cache that requests hold, by cache group; only of models with several.",
        unit="pages",
        labels=("model", "group"),
    ),
    Gauge(
        name="cairn_cache_findable_pages",
        help="Pages of the cache that no request holds, and that may still be found as a prefix.",
        unit="pages",
        labels=("model",),
    ),
    Gauge(
        name="cairn_cache_pages",
        help="Pages of the cache.",
        unit="pages",
        labels=("model",),
    ),
    Gauge(
        name="cairn_weights_bytes",
        help="Weights as the engine holds them, in whatever form, on all of its ranks.",
        unit="bytes",
        labels=("model",),
    ),
    Gauge(
        name="cairn_engine_steps",
        help="Steps that the engine has taken since it started.",
        unit="steps",
        labels=("model",),
    ),
)


GAPS = "cairn_inter_token_seconds"


def server_metrics(model: str, gaps: "Gaps") -> Metrics:
    """With the histograms' and counters' zeros, so that a rate is known from the first request on."""
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
        """For the registry: the same histogram, cumulative."""
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
        if any(getattr(stats, name) < getattr(self._last, name) for name in GROWING):
            self._last = Stats()
        last, self._last = self._last, stats

        def add(metric: str, name: str, **labels: str) -> None:
            grown = getattr(stats, name) - getattr(last, name)
            metrics.add(metric, grown, model=self._model, **labels)

        add("cairn_preempted_requests_total", "preempted")
        add("cairn_prefix_looked_up_tokens_total", "prefix_tokens")
        add("cairn_prefix_found_tokens_total", "prefix_hits")
        add("cairn_remote_prompts_total", "remote_prefills")
        add("cairn_fallback_prompts_total", "prefill_fallbacks")
        add("cairn_offload_loaded_tokens_total", "host_tokens", tier="host")
        add("cairn_offload_loaded_tokens_total", "disk_tokens", tier="disk")
        add("cairn_offload_failed_loads_total", "failed_loads")
        add("cairn_media_pictures_total", "pictures", rows="computed")
        add("cairn_media_pictures_total", "pictures_found", rows="found")
        add("cairn_media_tower_seconds_total", "tower_s")
        add("cairn_spec_decode_num_drafts_total", "draft_runs")
        for position, accepted in enumerate(stats.accepted_at):
            before = last.accepted_at[position] if position < len(last.accepted_at) else 0
            metrics.add(
                "cairn_spec_decode_num_accepted_tokens_per_pos_total",
                accepted - before,
                model=self._model,
                position=str(position),
            )
        add("cairn_spec_decode_num_draft_tokens_total", "drafted")
        add("cairn_spec_decode_num_accepted_tokens_total", "accepted")
        add("cairn_engine_seconds_total", "host_s", part="host")
        add("cairn_engine_seconds_total", "device_s", part="device")


def count_parts(metrics: Metrics, model: str, entry: "Entry") -> None:
    """The phases of a request that has ended."""
    for part in entry.parts():
        metrics.observe("cairn_request_phase_seconds", part.seconds, model=model, phase=part.name)
