"""The metrics of the server for Prometheus, beyond those that every part of Cairn has. Data only.

Times are seen from the server: from the body of a request to what was handed to its socket.
"""

from cairn.core.metrics import (
    CATALOGUE,
    LATENCY_SECONDS,
    CounterMetric,
    Gauge,
    Histogram,
    MetricSpec,
)

CATALOGUE_HTTP: tuple[MetricSpec, ...] = (
    *CATALOGUE,
    CounterMetric(
        name="cairn_http_requests_total",
        help="Requests that were answered.",
        unit="requests",
        labels=("endpoint", "status"),
    ),
    CounterMetric(
        name="cairn_finished_requests_total",
        help="Answers that ended, by the reason.",
        unit="requests",
        labels=("model", "reason"),
    ),
    CounterMetric(
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
    CounterMetric(
        name="cairn_preempted_requests_total",
        help="Requests that lost their place in the batch, because the cache was full.",
        unit="requests",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_prefix_looked_up_tokens_total",
        help="Prompt tokens that were looked for in the prefix cache.",
        unit="tokens",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_prefix_found_tokens_total",
        help="Prompt tokens that were found there.",
        unit="tokens",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_engine_seconds_total",
        help="Time of the engine's steps: of the host, deciding and taking in; of the device, computing.",
        unit="seconds",
        labels=("model", "part"),
    ),
    CounterMetric(
        name="cairn_key_tokens_total",
        help="Tokens of requests that ended, by API key: prompt, cached (of the prompt), output.",
        unit="tokens",
        labels=("model", "key", "kind"),
    ),
    CounterMetric(
        name="cairn_key_device_seconds_total",
        help="Time of the device, shared among the requests of each second by their tokens.",
        unit="seconds",
        labels=("model", "key"),
    ),
    CounterMetric(
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
    CounterMetric(
        name="cairn_remote_prompts_total",
        help="Prompts that a prefill server computed.",
        unit="prompts",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_fallback_prompts_total",
        help="Prompts that a prefill server was asked for, and that were computed here instead.",
        unit="prompts",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_offload_loaded_tokens_total",
        help="Prompt tokens whose pages were loaded from a tier of the cache: host or disk.",
        unit="tokens",
        labels=("model", "tier"),
    ),
    CounterMetric(
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
    CounterMetric(
        name="cairn_media_pictures_total",
        help="Pictures of requests: computed by the tower, or found in its rows.",
        unit="pictures",
        labels=("model", "rows"),
    ),
    CounterMetric(
        name="cairn_media_tower_seconds_total",
        help="Seconds that the engine spent on the tower; on a GPU, on launching it.",
        unit="seconds",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_spec_decode_num_drafts_total",
        help="Times that drafts of a request were verified.",
        unit="drafts",
        labels=("model",),
    ),
    CounterMetric(
        name="cairn_spec_decode_num_accepted_tokens_per_pos_total",
        help="Drafts that were accepted, by their position behind the last token.",
        unit="tokens_per_pos",
        labels=("model", "position"),
    ),
    CounterMetric(
        name="cairn_spec_decode_num_draft_tokens_total",
        help="Tokens that a drafter proposed and a step verified.",
        unit="tokens",
        labels=("model",),
    ),
    CounterMetric(
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
