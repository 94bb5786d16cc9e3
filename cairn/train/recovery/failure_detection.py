"""Is something wrong, and with whom? The detection ladder, from the surest sign to the vaguest.

    exit        a process has ended                           at once
    silence     a rank gives no sign of life                  stopped, swapped out, its node gone
    stuck       all live, no step and no collective           the rank that has begun the fewest is the suspect
    slow        one rank computes far longer than the others  named; what is done is the ladder's
    corrupted, NaN                                            ranks find these themselves (`checksum`, `bad_step`)

A pure function of what the board said and of the clock: no process is touched here.
"""

import bisect
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from cairn.core.exit_cause import CauseVerdict, ExitEvidence, classify
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.status_board import STARTING, TRAINING

Kind = Literal["exit", "silence", "stuck", "late", "slow"]
STARVED = 10  # a rank that the kernel would run has so many times the patience: the machine is busy
SLOW_STEPS = 3  # a rank is slow when it was in so many of the last steps
KEPT = 1000  # steps that are waited for, until every rank has reported them
LEAST_BUSY_S = 0.02  # steps shorter than this say nothing about who is slow


class StepWork(NamedTuple):
    """Work of a rank in a step."""

    step: int
    busy_s: float  # computing, until its gradients had to wait for others
    step_s: float  # the whole step, the same for all; 0: not known


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """State of a rank on the board."""

    rank: int
    alive: bool
    phase: int
    beat: float  # seconds, on the clock of `now`; 0: never
    step: int = 0
    collectives: int = 0
    busy_s: float = 0.0  # of the last step
    # Of all steps since the last look; None: only `busy_s` is known.
    recent: tuple[StepWork, ...] | None = None
    waits: bool = True  # in a collective, as far as is known
    state: str = ""  # of its process, as the kernel says (R, S, D, T ...), where it can be asked


class Finding(msgspec.Struct, frozen=True):
    kind: Kind
    rank: int
    since: float  # the last moment in which it was seen well
    why: str


class Progress(msgspec.Struct, frozen=True):
    """Progress of the ranks at the last change, and its time."""

    signature: tuple[tuple[int, int, int], ...] = ()
    at: float = 0.0


def moved(before: Progress, ranks: Sequence[RankView], now: float) -> Progress:
    signature = tuple((one.phase, one.step, one.collectives) for one in ranks)
    return before if signature == before.signature else Progress(signature, now)


def judge(
    ranks: Sequence[RankView], progress: Progress, started: float, now: float, settings: Recovery
) -> Finding | None:
    """The surest finding, or None. `started`: when these processes were."""
    for one in ranks:
        if not one.alive:
            return Finding("exit", one.rank, one.beat or started, "its process has ended")
    quiet = [
        one for one in ranks if one.beat and now - one.beat > patience(one.state, settings.silent_s)
    ]
    if quiet:
        worst = min(quiet, key=lambda one: one.beat)
        return Finding(
            "silence", worst.rank, worst.beat, f"no sign of life for {now - worst.beat:.1f} s"
        )
    if all(one.phase == TRAINING for one in ranks) and now - progress.at > settings.stuck_s:
        worst = suspect(ranks)
        return Finding(
            "stuck",
            worst.rank,
            progress.at,
            f"nothing moved for {now - progress.at:.1f} s; it has begun {worst.collectives} collectives, "
            f"others up to {max(one.collectives for one in ranks)}",
        )
    late = [one for one in ranks if one.phase <= STARTING]
    if late and now - started > settings.start_s:
        return Finding("late", late[0].rank, started, f"not started after {now - started:.0f} s")
    return None


def verdict_of(finding: Finding) -> CauseVerdict:
    """Verdict of a finding other than the end of a process."""
    if finding.kind == "slow":
        return CauseVerdict("straggler", finding.why)
    verdict = classify(
        ExitEvidence(silent=finding.kind == "silence", stuck=finding.kind != "silence")
    )
    return CauseVerdict(verdict.cause, finding.why)


def patience(state: str, silent_s: float) -> float:
    """Silence timeout of a process; longer for one that the kernel calls runnable, because it is only starved."""
    return silent_s * (STARVED if state in ("R", "S", "D") else 1)


def suspect(ranks: Sequence[RankView]) -> RankView:
    """The suspect among ranks that wait for each other: fewest collectives; on a tie one that is in none."""
    return min(ranks, key=lambda one: (one.collectives, one.step, one.waits, one.rank))


class Slow(NamedTuple):
    """A straggler, and the numbers that say so: medians of the steps in which it was slow."""

    rank: int
    step: int
    busy_s: float  # that it computes
    others_s: float  # that the others do, in the median
    step_s: float  # of the whole step; 0: not known

    def words(self) -> str:
        """Describe the straggler; it waits for no other rank, so the rest of its step is communication."""
        times = self.busy_s / max(self.others_s, 1e-9)
        text = f"computes {self.busy_s:.3f} s of a step, {min(times, 999):.1f} times the others' {self.others_s:.3f} s"
        if not self.step_s:
            return text
        rest = max(0.0, self.step_s - self.busy_s)
        waits = max(0.0, self.step_s - self.others_s)
        return f"{text}, who wait {waits:.3f} s; network and the rest of its step take {rest:.3f} s"


class Slowness:
    """Straggler detection over consecutive steps; a single slow step names no rank.

    Steps are looked at one by one, once every rank has reported them: nodes report at different moments.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.in_a_row: dict[int, int] = {}
        self.fine_in_a_row: dict[int, int] = {}
        self.step = -1
        self.reported: dict[int, dict[int, StepWork]] = {}  # step -> rank -> what it did
        self.recent: dict[int, list[Slow]] = {}  # the slow steps in a row
        self.named: set[int] = set()  # who is a straggler now
        self.evidence: dict[int, Slow] = {}  # of all who ever were
        self.over: list[int] = []  # who has just ceased to be one
        self.dragged_s = 0.0  # by which stragglers made steps longer

    def look(self, observed: Sequence[RankView]) -> list[int]:
        """Ranks that have just become stragglers, with `evidence`. Looks once at each step."""
        self.over = []
        for one in observed:
            steps = (StepWork(one.step, one.busy_s, 0.0),) if one.recent is None else one.recent
            for spent in steps:
                if spent.step > self.step:
                    self.reported.setdefault(spent.step, {})[one.rank] = spent
        stragglers: list[int] = []
        for step in sorted(self.reported):
            if len(observed) > 1 and len(self.reported[step]) == len(observed):
                stragglers += self._one(step, self.reported[step])
                self.step = step
        least = min((one.step for one in observed), default=0)
        self.reported = {
            s: ranks for s, ranks in self.reported.items() if s > max(self.step, least - KEPT)
        }
        return stragglers

    def _one(self, step: int, ranks: dict[int, StepWork]) -> list[int]:
        stragglers = []
        ordered = sorted(spent.busy_s for spent in ranks.values())
        for rank, mine in ranks.items():
            others_s = median_of_others(ordered, mine.busy_s)
            slow = is_slow(mine.busy_s, others_s, self.factor)
            if slow:
                now = Slow(rank, step, mine.busy_s, others_s, mine.step_s)
                self.recent[rank] = [*self.recent.get(rank, [])[1 - SLOW_STEPS :], now]
            self.in_a_row[rank] = self.in_a_row.get(rank, 0) + 1 if slow else 0
            self.fine_in_a_row[rank] = 0 if slow else self.fine_in_a_row.get(rank, 0) + 1
            if self.in_a_row[rank] == SLOW_STEPS and rank not in self.named:
                self.evidence[rank] = _middle(self.recent[rank])
                self.named.add(rank)
                stragglers.append(rank)
            elif rank in self.named and self.fine_in_a_row[rank] == SLOW_STEPS:
                self.named.remove(rank)
                self.over.append(rank)
        worst = [
            ranks[r].busy_s - self.recent[r][-1].others_s for r in self.named if self.in_a_row[r]
        ]
        self.dragged_s += max(worst, default=0.0)
        return stragglers


def _middle(slow: Sequence[Slow]) -> Slow:
    """The last one, with the medians of all."""
    return slow[-1]._replace(
        busy_s=statistics.median(one.busy_s for one in slow),
        others_s=statistics.median(one.others_s for one in slow),
        step_s=statistics.median(one.step_s for one in slow),
    )


def is_slow(mine_s: float, others_s: float, factor: float) -> bool:
    """The rule, for one rank in one step: what it computed against the median of the others."""
    return mine_s > max(LEAST_BUSY_S, factor * others_s)


def median_of_others(ordered: Sequence[float], mine: float) -> float:
    """Median of all values but `mine`, without sorting again for each of thousands of ranks."""
    left_out, others = bisect.bisect_left(ordered, mine), len(ordered) - 1

    def nth(n: int) -> float:
        return ordered[n if n < left_out else n + 1]

    return nth(others // 2) if others % 2 else (nth(others // 2 - 1) + nth(others // 2)) / 2
