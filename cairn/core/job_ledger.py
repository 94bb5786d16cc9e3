"""Breakdown of a job's wall time: every second belongs to one of six parts, and the parts add up to the total.

    wall = productive + lost + checkpoint + detect + restart + queue          ETTR = productive / wall

    queue        submitted, not started            detect       something has failed, not detected yet
    restart      processes start, state is read    lost         steps that had to be done again
    checkpoint   training waited for a copy        productive   steps that stayed

`account` is a pure function of what happened and when: the live view, the report, /metrics and the tests read it alike.
No clock and no files in here: `job_ledger_files` writes the ledger into the run's folder and reads it there.
"""

import copy
from collections.abc import Iterable
from typing import Literal

import msgspec

from cairn.core.job_events import (
    AnyEvent,
    Ended,
    Failed,
    Noticed,
    Paused,
    Started,
    Stepped,
    Submitted,
    Trained,
)

Part = Literal["productive", "lost", "checkpoint", "detect", "restart", "queue"]
PARTS: tuple[Part, ...] = Part.__args__  # type: ignore[attr-defined]


class JobIncident(msgspec.Struct, frozen=True, kw_only=True):
    """A failure and its cost."""

    cause: str
    why: str
    rung: str
    rank: int | None
    node: int | None
    host: str = ""
    step: int  # the last one that had been done
    back_to: int  # the one from which the run went on
    detect_s: float
    recovery_s: float  # from the finding to the next step's beginning

    @property
    def steps_lost(self) -> int:
        return self.step - self.back_to


class SlowRank(msgspec.Struct, frozen=True, kw_only=True):
    """A rank for which the others had to wait."""

    rank: int
    host: str
    why: str
    step: int  # at which it was named
    until: int | None = None  # None: still

    def line(self) -> str:
        where = f" on {self.host}" if self.host else ""
        when = (
            f"since step {self.step}"
            if self.until is None
            else f"steps {self.step} to {self.until}"
        )
        return f"rank {self.rank}{where}, {when}: {self.why}"


class JobLedger(msgspec.Struct, frozen=True, kw_only=True):
    """The sums so far. `by_cause`: part -> cause -> seconds, of the parts that have a cause."""

    wall: float
    parts: dict[str, float]
    by_cause: dict[str, dict[str, float]]
    incidents: list[JobIncident]
    steps: int
    state: str  # queued, restarting, training, ended, failed
    ettr: float
    slow: list[SlowRank] = []
    copied: int = -1  # the newest step that memory holds of every rank
    doubled: int = -1  # and that two nodes hold

    def slow_now(self) -> list[SlowRank]:
        running = self.state in ("training", "restarting")
        return [one for one in self.slow if one.until is None and running]

    def line(self) -> str:
        """Summary in one line."""
        spent = ", ".join(
            f"{part} {self.parts[part]:.1f} s" for part in PARTS[1:] if self.parts[part] >= 0.05
        )
        last = self.incidents[-1] if self.incidents else None
        after = (
            f"; last failure: {last.cause} ({last.why}), answered by {last.rung}" if last else ""
        )
        share = f"{self.ettr:.0%} of {self.wall:.1f} s productive"
        dragged = self.by_cause.get("productive", {}).get("straggler", 0.0)
        slower = f" ({dragged:.1f} s of it waiting for slow ranks)" if dragged >= 0.05 else ""
        slow = f"; slow: {self.slow[-1].line()}" if self.slow else ""
        return f"{self.state} at step {self.steps}: {share}{slower}; {spent or 'nothing lost'}{after}{slow}"


class Book:
    """The walk over the events: each interval between two of them goes to one part, or is split."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys(PARTS, 0.0)
        self.by_cause: dict[str, dict[str, float]] = {}
        # (step, seconds, of those dragged by a slow rank) that a failure could still cost
        self.doubtful: list[tuple[int, float, float]] = []
        self.dragged = 0.0  # said, and not yet taken from a step
        self.slow: list[SlowRank] = []
        self.open = 0.0  # of the step that has not ended
        self.cause = "start"
        self.incidents: list[JobIncident] = []
        self.failed: Failed | None = None
        self.step = self.reached = 0
        self.state = "queued"
        self.now: float | None = None
        self.started = 0.0  # the newest life of the ranks
        self.copied = self.doubled = -1

    def ledger(self, now: float | None = None) -> JobLedger:
        """The sums so far; `now`: until when what happens at the moment has lasted. Changes nothing."""
        sums = copy.copy(self)
        sums.parts = dict(self.parts)
        sums.by_cause = {part: dict(causes) for part, causes in self.by_cause.items()}
        if now is not None:
            sums.close(now)
        wall = sum(sums.parts.values())
        pending = [] if self.failed is None else [sums._incident(self.failed, sums.now)]
        return JobLedger(
            wall=wall,
            parts={**sums.parts},
            by_cause=sums.by_cause,
            incidents=[*self.incidents, *pending],
            steps=sums.step,
            state=sums.state,
            ettr=sums.parts["productive"] / wall if wall > 0 else 0.0,
            slow=list(self.slow),
            copied=self.copied,
            doubled=self.doubled,
        )

    def safe(self, step: int) -> None:
        """No failure will cost the steps up to this one any more."""
        self.doubtful = [one for one in self.doubtful if one[0] > step]

    def add(self, part: Part, seconds: float, cause: str = "") -> None:
        self.parts[part] += seconds
        if cause:
            causes = self.by_cause.setdefault(part, {})
            causes[cause] = causes.get(cause, 0.0) + seconds

    def pass_time(self, at: float) -> float:
        """Seconds since the last event; time does not run backwards."""
        seconds = 0.0 if self.now is None else max(0.0, at - self.now)
        self.now = at if self.now is None else max(self.now, at)
        return seconds

    def take(self, event: AnyEvent) -> None:
        match event:
            case Submitted():
                self.add("queue", self.pass_time(event.at), "queue")
            case Started():
                self._idle(event.at)
                self._back_to(event.step)
                self.state, self.started = "restarting", event.at
            case Trained():
                self._trained(event)
            case Stepped():
                self._stepped(event)
            case Failed():
                self._failed(event)
            case Noticed():
                self._noticed(event)
            case Paused():
                self._running(event.at, 0.0)
                self.cause, self.state = event.cause, "restarting"
            case Ended():
                self.close(event.at)
                self.state = "ended" if event.finished else "failed"

    def _idle(self, at: float) -> None:
        seconds = self.pass_time(at)
        if self.state == "queued":
            self.add("queue", seconds, "queue")
        elif self.state == "training":
            self.open += seconds
        else:
            self.add("restart", seconds, self.cause)

    def _trained(self, event: Trained) -> None:
        self._idle(event.at)
        self.state = "training"
        if self.failed is not None:
            self.incidents.append(self._incident(self.failed, event.at))
            self.failed = None

    def _incident(self, failed: Failed, until: float | None) -> JobIncident:
        return JobIncident(
            cause=failed.cause,
            why=failed.why,
            rung=failed.rung,
            rank=failed.rank,
            node=failed.node,
            host=failed.host,
            step=self.reached,
            back_to=self.step,
            detect_s=max(0.0, failed.at - failed.since),
            recovery_s=max(0.0, (until or failed.at) - failed.at),
        )

    def _running(self, at: float, blocked: float) -> float:
        """Time of the open step; the part that waited for checkpoints is taken out. What is left of it."""
        spent = self.open + self.pass_time(at)
        self.open = 0.0
        waited = min(blocked, spent)
        self.add("checkpoint", waited)
        self.add("productive", spent - waited)
        return spent - waited

    def _stepped(self, event: Stepped) -> None:
        worked = self._running(event.at, event.blocked)
        self.step = event.step
        self.dragged += event.dragged
        dragged = min(self.dragged, worked)
        self.dragged -= dragged
        self._drag(dragged)
        self.doubtful.append((event.step, worked, dragged))

    def _drag(self, seconds: float) -> None:
        """Account the part of the productive time that a straggler caused."""
        if seconds:
            causes = self.by_cause.setdefault("productive", {})
            causes["straggler"] = max(0.0, causes.get("straggler", 0.0) + seconds)

    def _noticed(self, event: Noticed) -> None:
        if event.what == "straggler":
            named = SlowRank(rank=event.rank, host=event.host, why=event.why, step=event.step)
            self.slow.append(named)
        elif event.what == "straggler over":
            self.slow = [
                msgspec.structs.replace(one, until=event.step)
                if one.rank == event.rank and one.until is None
                else one
                for one in self.slow
            ]

    def _failed(self, event: Failed) -> None:
        since = min(event.at, max(event.since, self.now if self.now is not None else event.since))
        if self.state == "training":
            self.open += self.pass_time(since)
            self.add("lost", self.open, event.cause)  # the step that never ended
            self.open = 0.0
        else:
            self._idle(since)
        self.add("detect", self.pass_time(event.at), event.cause)
        self.failed = event
        self.reached = self.step
        self.cause, self.state = event.cause, "restarting"

    def _back_to(self, step: int) -> None:
        """The steps after `step` have to be done again: their time was lost."""
        repeated_s = sum(seconds for done, seconds, _ in self.doubtful if done > step)
        if repeated_s:
            self.add("productive", -repeated_s)
            self.add("lost", repeated_s, self.cause)
            self._drag(-sum(dragged for done, _, dragged in self.doubtful if done > step))
        self.doubtful = []
        self.slow = [
            one if one.until is not None else msgspec.structs.replace(one, until=self.step)
            for one in self.slow
        ]
        self.step = step

    def close(self, at: float) -> None:
        if self.state == "training":
            self._running(at, 0.0)
        elif self.state not in ("ended", "failed"):
            self._idle(at)


def account(events: Iterable[AnyEvent], now: float | None = None) -> JobLedger:
    """The ledger after these events; `now`: the time that the last of them has lasted so far."""
    book = Book()
    for event in events:
        book.take(event)
    return book.ledger(now)
