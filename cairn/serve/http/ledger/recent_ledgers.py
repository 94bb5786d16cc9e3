"""The ledgers of the last requests: what runs, and the thousand that ended last.

    begin --> running --settle--> ended (the oldest is forgotten) ...        view: an entry as a document

Bounded: an entry that has ended holds some forty numbers, and no text. Belongs to the thread of the event loop. An id
that a client uses twice is found as the newer request; both are listed.
"""

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from cairn.hw.roofline import Floor
from cairn.serve.http.ledger.entry import Entry
from cairn.serve.http.ledger.floor import Floors
from cairn.serve.http.ledger.reason import Phases, reason_of
from cairn.serve.http.ledger.views import (
    FloorView,
    LatencyView,
    Percentiles,
    Reason,
    RequestView,
    SpanView,
)
from cairn.serve.job import Job

REMEMBERED = 1000
log = logging.getLogger("cairn")
DIGITS = 6  # of seconds: a microsecond is what a stamp is good for

Order = Literal["newest", "slowest"]


class RecentLedgers:
    def __init__(self, floors: Floors, remember: int = REMEMBERED) -> None:
        self.floors, self._most = floors, remember
        self.on_settled: list[Callable[[Entry], None]] = []  # metrics, traces
        self._running: dict[int, Entry] = {}  # by identity
        self._ended: deque[Entry] = deque()
        self._found: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._ended)

    def running(self) -> list[Entry]:
        return list(self._running.values())

    def begin(
        self, id: str, endpoint: str, arrived: float, jobs: Sequence[Job], key: str = ""
    ) -> Entry:
        entry = Entry(id, endpoint, arrived, jobs)
        entry.key = key
        self._running[_key(entry)] = self._found[id] = entry
        return entry

    def settle(self, entry: Entry) -> None:
        """Nothing more happens to it. Twice is fine."""
        if self._running.pop(_key(entry), None) is None:
            return
        self._ended.append(entry)
        if len(self._ended) > self._most:
            oldest = self._ended.popleft()
            if self._found.get(oldest.id) is oldest:
                del self._found[oldest.id]
        for tell in self.on_settled:
            try:
                tell(entry)
            except Exception:  # the answer was sent; a fault of its ledger must not undo that
                log.exception("the ledger of request %s could not be told", entry.id)

    def find(self, id: str) -> Entry | None:
        return self._found.get(id)

    def entries(self, order: Order = "newest", limit: int = REMEMBERED) -> list[Entry]:
        """The running ones are among them."""
        every = [*self._ended, *self._running.values()]
        if order == "slowest":
            return heapq.nlargest(limit, every, key=lambda entry: entry.seconds)
        return heapq.nlargest(limit, every, key=lambda entry: entry.arrived)

    def latency(self) -> LatencyView:
        """Latencies of finished requests; the time per token is a mean of each request."""
        return LatencyView(
            ttft_s=percentiles(entry.to_first for entry in self._ended),
            itl_s=percentiles(entry.per_token for entry in self._ended),
            e2e_s=percentiles(entry.seconds for entry in self._ended),
        )

    def view(self, entry: Entry, about_to: str | None = None) -> RequestView:
        """`about_to`: the status that it is going to end with, at this moment."""
        entry.look()
        now = entry.ended or time.monotonic()
        has_ended = bool(entry.ended or about_to)
        ledger, floors = entry.ledger, self.floors
        prefill, decode = floors.of(ledger.prefill), floors.of(ledger.decode)
        reason, text = self._reason(entry, prefill, decode)
        spans = [
            SpanView(
                name=part.name,  # type: ignore[arg-type]
                start_s=_round(part.start - entry.arrived),
                seconds=_round(part.seconds),
                summed=part.summed,
            )
            for part in entry.parts(now)
        ]
        return RequestView(
            id=entry.id, endpoint=entry.endpoint, status=about_to or entry.status, began=_round(entry.began),
            prompt_tokens=entry.prompt, cached_tokens=entry.cached, output_tokens=entry.outputs,
            ttft_s=_maybe(entry.to_first), tpot_s=_maybe(entry.per_token),
            e2e_s=_round(now - entry.arrived) if has_ended else None, preemptions=ledger.preemptions, spans=spans,
            floor=FloorView(prefill_s=_seconds(prefill), decode_s=_seconds(decode)), reason=reason,
            text_of_reason=text, answers=entry.answers, streamed=entry.streamed, steps=entry.steps,
            drafted_tokens=ledger.drafted, accepted_tokens=ledger.accepted,
            host_tokens=ledger.host_tokens, disk_tokens=ledger.disk_tokens, load_s=_round(ledger.load),
            prefill_chunks=ledger.prefill_chunks, digest=entry.digest, key=entry.key or None,
            device_s=_round(entry.device_s) if entry.device_s else None,
            joules=_round(entry.joules) if entry.joules else None, cache_miss=entry.miss,
            text_of_miss=entry.miss_text,
        )  # fmt: skip

    def _reason(
        self, entry: Entry, prefill: Floor | None, decode: Floor | None
    ) -> tuple[Reason, str]:
        ledger = entry.ledger
        took = {part.name: part.seconds for part in entry.parts() if not part.summed}
        return reason_of(
            Phases(
                tokenize=took["tokenize"],
                queue=took.get("queue", 0.0) + took.get("schedule", 0.0),
                prefill=took.get("prefill", 0.0),
                decode=took.get("decode", 0.0),
                respond=took.get("respond", 0.0),
                requeued=max(ledger.requeued, 0.0),
                host=ledger.prefill.host + ledger.decode.host,
                device=ledger.prefill.device + ledger.decode.device,
                overlapped=self.floors.facts.device.startswith("cuda"),
                tokens=entry.outputs if entry.answers == 1 else 0,
                per_token=entry.per_token,
                longest=entry.longest,
                prefill_bound=prefill.bound if prefill else "compute",
                decode_bound=decode.bound if decode else "memory",
                prefill_floor=_seconds(prefill),
                decode_floor=_seconds(decode),
            )
        )


def percentiles(values: Iterable[float | None]) -> Percentiles:
    """Percentiles by nearest rank, so that each is an observed value."""
    ranked = sorted(value for value in values if value is not None)
    if not ranked:
        return Percentiles()
    at = [ranked[max(-(-len(ranked) * percent // 100) - 1, 0)] for percent in (50, 90, 99)]
    return Percentiles(p50=_round(at[0]), p90=_round(at[1]), p99=_round(at[2]), count=len(ranked))


def _key(entry: Entry) -> int:
    return id(entry)


def _round(seconds: float) -> float:
    return round(seconds, DIGITS)


def _maybe(seconds: float | None) -> float | None:
    return None if seconds is None else _round(seconds)


def _seconds(floor: Floor | None) -> float | None:
    return None if floor is None else floor.seconds
