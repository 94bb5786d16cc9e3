"""Documents of the /cairn/* endpoints.

    EngineView   what the engine does now: batch, pages, rates, the last steps     /cairn/engine, /cairn/engine/events
    RequestView  where the time of one request went, and what it could have cost   /cairn/requests, .../{id}
    ModelView    the model card                                                     /cairn/model

Made by `recent_ledgers.py` and `engine_view.py`, drawn by the page. None of it holds text of a prompt or of an answer.
Times are seconds; a value that is not known is null, never 0.
"""

from typing import Any, Literal

import msgspec

SpanName = Literal[
    "tokenize", "media", "queue", "schedule", "prefill", "kv_allocation", "decode", "detokenize", "stream", "respond"
]  # fmt: skip
Reason = Literal["queue", "compute", "memory", "host", "tail"]
LimitedBy = Literal["memory", "compute"]


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a page table: they keep all keys, those of a window, or a state."""

    kind: str
    window: int  # tokens; 0: none
    layers: int
    used: int  # pages that requests hold


class PagesView(msgspec.Struct, frozen=True, kw_only=True):
    """The cache. `map` has one character for each equal share of the pages, in the order of their ids."""

    total: int
    used: int  # held by requests
    cached: int  # free to be taken, and still holding a prefix that may be asked for again
    free: int  # free, and not found as a prefix
    size_tokens: int
    map: str  # '0'..'9': tenths held by requests; 'c': mostly cached; '.': free
    map_groups: str = ""  # of each held cell, the place in `groups` of most of its pages
    groups: list[GroupView] = []  # where there are several


class DraftsView(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding since the start; a run is a request's drafts in one step."""

    runs: int = 0
    tokens: int = 0
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # how often the first, second, .. draft of a run held


class PrefixView(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens since the start: looked for in the prefix cache, and found there."""

    looked_up_tokens: int
    hit_tokens: int


class RateView(msgspec.Struct, frozen=True, kw_only=True):
    """Over the last five seconds."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float


class BatchView(msgspec.Struct, frozen=True, kw_only=True):
    """The newest step."""

    sequences: int
    decode_tokens: int
    prefill_tokens: int
    budget_tokens: int


class Percentiles(msgspec.Struct, frozen=True, kw_only=True):
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None
    count: int = 0


class LatencyView(msgspec.Struct, frozen=True, kw_only=True):
    """Over the requests that are remembered."""

    ttft_s: Percentiles
    itl_s: Percentiles  # the time per output token of each request
    e2e_s: Percentiles


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """Iteration of the engine loop; total_s is the sum of the four parts. On a GPU it waits for the previous step."""

    number: int
    ended: float  # seconds ago
    sequences: int
    tokens: int
    schedule_s: float
    launch_s: float
    wait_s: float
    update_s: float
    total_s: float
    floor_s: float | None = None  # what this machine needs for it at least
    limited_by: LimitedBy | None = None  # what the floor consists of


class EngineView(msgspec.Struct, frozen=True, kw_only=True):
    time: float  # unix
    model: str
    status: str
    steps: int
    running: int
    waiting: int
    preempted: int  # since the start
    open_requests: int
    pages: PagesView
    prefix: PrefixView
    rate: RateView
    batch: BatchView
    latency: LatencyView
    recent: list[StepView]  # oldest first
    drafts: DraftsView = DraftsView()


class KeyView(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of an API key since the server started."""

    key: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    device_s: float
    joules: float | None = None  # null: the device has no energy counter
    today_tokens: int = 0
    today_left: int | None = None  # of the budget of a day; null: no limit


class UsageView(msgspec.Struct, frozen=True, kw_only=True):
    """Keys and the idle rest add up to what the engine and the energy counter say."""

    keys: list[KeyView]
    idle_device_s: float
    idle_joules: float | None = None
    engine_prompt_tokens: int  # computed, by the engine's own count
    engine_output_tokens: int
    engine_device_s: float
    event_loop_lag_s: float  # the worst of the last ten seconds


class SpanView(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a request.

    tokenize, queue, schedule, prefill, decode and respond follow one another and add up to e2e_s; respond is from the
    engine's last token to the last byte that was handed to the socket. One that is `summed` (kv_allocation, detokenize,
    stream) happened in many short pieces inside the others, beside the engine's steps.
    """

    name: SpanName
    start_s: float  # since the request began
    seconds: float
    summed: bool = False


class FloorView(msgspec.Struct, frozen=True, kw_only=True):
    """Minimum time of this request's share of its steps on this machine."""

    prefill_s: float | None = None
    decode_s: float | None = None


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # x-request-id
    endpoint: str
    status: str  # running, or the reason of its end: stop, length, tool_calls, abort, error ...
    began: float  # unix
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    preemptions: int = 0
    spans: list[SpanView] = msgspec.field(default_factory=list)
    floor: FloorView = FloorView()
    reason: Reason | None = None
    text_of_reason: str = ""
    answers: int = 1  # how many were made at the same time (n, or several prompts)
    streamed: bool = False
    steps: int = 0  # of the engine, that computed something of it
    key: str | None = None  # the name of its API key
    device_s: float | None = None  # its share of the device's time, by tokens
    joules: float | None = None  # and of the energy that the GPU took; null: not known
    # Why the prefix cache had no more: hit, never seen, evicted, changed ...
    cache_miss: str | None = None
    text_of_miss: str = ""
    digest: str | None = None  # of the answers' tokens: the same tokens have the same one
    prefill_chunks: int = 0
    drafted_tokens: int = 0  # that a drafter guessed and a step verified
    accepted_tokens: int = 0  # of those, that were right
    host_tokens: int = 0  # of the cached ones, that came back from host memory
    disk_tokens: int = 0  # and from the disk
    load_s: float = 0.0  # that it waited for them, as a part of the queue


class RequestList(msgspec.Struct, frozen=True, kw_only=True):
    requests: list[RequestView]


class TraceView(msgspec.Struct, frozen=True, kw_only=True):
    """A timeline in the format that Perfetto and chrome://tracing open."""

    displayTimeUnit: str
    traceEvents: list[dict[str, Any]]


class CeilingsView(msgspec.Struct, frozen=True, kw_only=True):
    memory_gbps: float | None = None
    tflops: float | None = None
    measured: bool = False  # by `cairn calibrate`; else from a data sheet or a quick look


class ModelView(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    names: list[str]
    family: str | None
    parameters: int | None
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    vocabulary: int
    context: int
    dtype: str | None
    device: str | None
    weights_bytes: int | None
    kv_bytes_per_token: int | None
    cache_bytes: int | None  # of all pages
    cache_groups: int  # a short request holds a page of each
    pages: int
    page_size: int
    notes: list[str]
    version: str
    ceilings: CeilingsView
    sees: bool = False  # whether it takes pictures
