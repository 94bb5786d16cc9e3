"""Timings of a request: timestamps while it runs, evaluated when they are read.

    arrived  submitted  admitting  scheduled  first_token       finished  ended
       |tokenize |  queue   | schedule |  prefill  |     decode    | respond |        add up to end-to-end
      [media]                    [kv_allocation]  [detokenize, stream]                sums, inside the others

An `Entry` belongs to an exchange and to the event loop's thread; it holds the requests of the engine as long as they
run, and copies the numbers of their ledgers when they end. No text is in it, then or later. All moments are of
time.monotonic, which the engine's process shares; a moment that never came is 0. Knows neither the floor nor HTTP.
"""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from cairn.serve.engine.request import Ledger
from cairn.serve.engine.step_times import Spent
from cairn.serve.http.ledger.prefix_history import Cause
from cairn.serve.job import Job


class Part(NamedTuple):
    name: str
    start: float  # a moment
    seconds: float
    summed: bool = False


class Entry:
    """A request of the server, which may be several of the engine (`n`, or a list of prompts)."""

    __slots__ = (
        "answers",
        "arrived",
        "began",
        "cached",
        "detokenize_s",
        "device_s",
        "digest",
        "ended",
        "endpoint",
        "first",
        "handing",
        "id",
        "jobs",
        "joules",
        "key",
        "last",
        "ledger",
        "longest",
        "metered",
        "miss",
        "miss_text",
        "outputs",
        "parent",
        "prompt",
        "status",
        "stream",
        "streamed",
        "submitted",
    )

    def __init__(self, id: str, endpoint: str, arrived: float, jobs: Sequence[Job]) -> None:
        self.id, self.endpoint, self.arrived = id, endpoint, arrived
        self.began = time.time() - (time.monotonic() - arrived)  # the same moment on the wall clock
        self.jobs: Sequence[Job] = jobs  # until it ends
        self.answers = len(jobs)
        self.prompt = sum(
            len(own) for own in {id_of(job): job.request.prompt for job in jobs}.values()
        )
        self.cached = self.outputs = 0
        self.submitted = time.monotonic()
        self.first = self.last = self.ended = 0.0  # as the event loop sees it
        self.handing = 0.0  # since when pieces are being made and written
        self.longest = 0.0  # between two pieces of one answer
        self.stream = self.detokenize_s = 0.0  # seconds of making bytes, and of making text
        self.streamed = False
        self.status = "running"
        self.key = ""  # the name of the API key that it came with
        self.device_s = self.joules = 0.0  # its share of what the engine and the device took
        self.metered = 0  # tokens that have been counted for that
        self.miss: Cause | None = None  # why the prefix cache had no more of its prompt
        self.miss_text = ""
        self.digest: str | None = None  # of the answers' tokens, if the ledger was asked for
        self.ledger = Ledger()
        self.parent: str | None = None  # the trace that it belongs to, as W3C writes it

    def hand_over(self, now: float) -> None:
        """Account the time between reading the last deltas and having written them."""
        if self.handing:
            self.stream += now - self.handing
            self.handing = 0.0

    def close(self, status: str, now: float) -> None:
        """The answers are over, one way or another; takes what is needed of the engine's requests and lets them go."""
        if self.ended:
            return
        self.look()
        self.hand_over(now)
        self.status, self.ended = status, now
        if not self.ledger.finished and all(job.answer.finished for job in self.jobs):
            self.ledger.finished = (
                self.last or now
            )  # aborted here: its end is not known from the engine yet
        self.jobs = ()

    def sent(self, now: float) -> None:
        """The last byte of a whole answer has been handed over."""
        self.stream += now - self.ended
        self.ended = now

    def look(self) -> None:
        """Read the engine's numbers, as far as they are known."""
        if not self.jobs:
            return
        self.ledger = together([job.request.ledger for job in self.jobs])
        firsts = {
            id_of(job): job.request for job in reversed(self.jobs)
        }  # of the answers to a prompt
        self.cached = sum(request.cached for request in firsts.values())
        self.outputs = sum(len(job.answer.whole.token_ids) for job in self.jobs)
        self.detokenize_s = sum(job.detokenize_s for job in self.jobs)

    def bill(self, device_s: float, joules: float) -> None:
        self.device_s += device_s
        self.joules += joules

    def advanced(self) -> int:
        """Tokens that were computed since this was last called; of a prompt all, when its first token has come."""
        self.look()
        computed = self.outputs + (self.prompt - self.cached if self.ledger.first_token else 0)
        fresh, self.metered = computed - self.metered, computed
        return fresh

    # -- what the stamps mean --------------------------------------------------------------------

    @property
    def seconds(self) -> float:
        """End to end; so far, if it runs."""
        return (self.ended or time.monotonic()) - self.arrived

    @property
    def to_first(self) -> float | None:
        return self.first - self.arrived if self.first else None

    @property
    def per_token(self) -> float | None:
        """Between two tokens of an answer, after its first; of several answers, of the average one."""
        more = self.outputs - self.answers
        return (self.last - self.first) * self.answers / more if more > 0 and self.first else None

    @property
    def steps(self) -> int:
        """Number of engine steps of this request: outputs without accepted drafts, plus earlier chunks."""
        ledger = self.ledger
        if not ledger.prefill_chunks:
            return 0
        drawn = self.outputs - ledger.accepted
        return max(drawn + ledger.prefill_chunks - self.answers - ledger.preemptions, 1)

    def parts(self, now: float | None = None) -> list[Part]:
        """Consecutive phases until the end or `now`, then the phases that are sums."""
        ledger, end = self.ledger, self.ended or now or time.monotonic()
        moments = [
            ("tokenize", self.submitted),
            ("queue", ledger.admitting),
            ("schedule", ledger.scheduled),
            ("prefill", ledger.first_token),
            ("decode", ledger.finished),
            ("respond", end),
        ]
        phases, start = [], self.arrived
        for name, moment in moments:
            moment = min(max(moment, start), end) if moment else end
            phases.append(Part(name, start, moment - start))
            start = moment
            if moment == end:  # it ended in this phase, or is in it
                break
        return [*phases, *self._sums()]

    def _sums(self) -> list[Part]:
        ledger = self.ledger
        sums = [
            ("media", self.arrived, ledger.media),
            ("kv_allocation", ledger.admitting, ledger.allocation),
            ("detokenize", ledger.first_token, self.detokenize_s),
            ("stream", self.first, self.stream),
        ]
        return [
            Part(name, start or self.arrived, seconds, True)
            for name, start, seconds in sums
            if seconds
        ]


def id_of(job: Job) -> int:
    """Answers to one prompt share its list."""
    return id(job.request.prompt)


def together(ledgers: Sequence[Ledger]) -> Ledger:
    """Merge the ledgers of engine requests that belong together, from the first start to the last end."""
    first = ledgers[0]
    if len(ledgers) == 1:
        return replace(first)
    finished = [ledger.finished for ledger in ledgers]
    return Ledger(
        arrived=_earliest(ledger.arrived for ledger in ledgers),
        admitting=_earliest(ledger.admitting for ledger in ledgers),
        scheduled=_earliest(ledger.scheduled for ledger in ledgers),
        first_token=_earliest(ledger.first_token for ledger in ledgers),
        finished=max(finished) if all(finished) else 0.0,
        preemptions=sum(ledger.preemptions for ledger in ledgers),
        prefill_chunks=sum(ledger.prefill_chunks for ledger in ledgers),
        allocation=sum(ledger.allocation for ledger in ledgers),
        pages=sum(ledger.pages for ledger in ledgers),
        requeued=max(ledger.requeued for ledger in ledgers),
        drafted=sum(ledger.drafted for ledger in ledgers),
        accepted=sum(ledger.accepted for ledger in ledgers),
        host_tokens=sum(ledger.host_tokens for ledger in ledgers),
        disk_tokens=sum(ledger.disk_tokens for ledger in ledgers),
        load=max(ledger.load for ledger in ledgers),
        media=max(ledger.media for ledger in ledgers),
        # Steps are shared, so the longest stands for all.
        prefill=max((ledger.prefill for ledger in ledgers), key=_steps),
        decode=max((ledger.decode for ledger in ledgers), key=_steps),
    )


def _steps(spent: Spent) -> int:
    return spent.steps


def _earliest(moments: Iterable[float]) -> float:
    return min((moment for moment in moments if moment), default=0.0)
