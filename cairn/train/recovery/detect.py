"""Is something wrong, and with whom? The detection ladder, from the surest sign to the vaguest.

    exit        a process has ended                           at once
    silence     a rank gives no sign of life                  stopped, swapped out, its node gone
    stuck       all live, no step and no collective           the rank that has begun the fewest is the suspect
    slow        one rank computes far longer than the others  told, not ended
    corrupted, NaN                                            ranks find these themselves (`checksum`, `bad_step`)

A pure function of what the board said and of the clock: no process is touched here.
"""

import statistics
from collections.abc import Sequence
from typing import Literal

import msgspec

from cairn.train.recovery.board import STARTING, TRAINING
from cairn.train.recovery.settings import Recovery

Kind = Literal["exit", "silence", "stuck", "late"]
STARVED = 10
SLOW_STEPS = 3  # a rank is slow when it was in so many of the last steps
LEAST_BUSY_S = 0.02  # steps shorter than this say nothing about who is slow


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One rank, as the board shows it."""

    rank: int
    alive: bool
    phase: int
    beat: float  # seconds, on the clock of `now`; 0: never
    step: int = 0
    collectives: int = 0
    busy_s: float = 0.0
    state: str = ""  # of its process, as the kernel says (R, S, D, T ...), where it can be asked


class Finding(msgspec.Struct, frozen=True):
    kind: Kind
    rank: int
    since: float  # the last moment in which it was seen well
    why: str


class Progress(msgspec.Struct, frozen=True):
    """What the ranks had done when something last moved, and when that was."""

    signature: tuple[tuple[int, int, int], ...] = ()
    at: float = 0.0


def moved(before: Progress, seen: Sequence[Seen], now: float) -> Progress:
    signature = tuple((one.phase, one.step, one.collectives) for one in seen)
    return before if signature == before.signature else Progress(signature, now)


def judge(
    seen: Sequence[Seen], progress: Progress, started: float, now: float, settings: Recovery
) -> Finding | None:
    """The surest finding, or None. `started`: when these processes were."""
    for one in seen:
        if not one.alive:
            return Finding("exit", one.rank, one.beat or started, "its process has ended")
    quiet = [one for one in seen if one.beat and now - one.beat > patience(one, settings)]
    if quiet:
        worst = min(quiet, key=lambda one: one.beat)
        return Finding(
            "silence", worst.rank, worst.beat, f"no sign of life for {now - worst.beat:.1f} s"
        )
    if all(one.phase == TRAINING for one in seen) and now - progress.at > settings.stuck_s:
        worst = suspect(seen)
        return Finding(
            "stuck", worst.rank, progress.at,
            f"nothing moved for {now - progress.at:.1f} s; it has begun {worst.collectives} collectives, "
            f"others up to {max(one.collectives for one in seen)}",
        )  # fmt: skip
    late = [one for one in seen if one.phase <= STARTING]
    if late and now - started > settings.start_s:
        return Finding("late", late[0].rank, started, f"not started after {now - started:.0f} s")
    return None


def patience(one: Seen, settings: Recovery) -> float:
    """A process that the kernel calls runnable is starved, not dead: a busy machine must not end a healthy run."""
    return settings.silent_s * (STARVED if one.state in ("R", "S", "D") else 1)


def suspect(seen: Sequence[Seen]) -> Seen:
    """Of ranks that wait for each other: the one that is behind."""
    return min(seen, key=lambda one: (one.collectives, one.step, one.rank))


class Slowness:
    """Who was far slower than the others, step after step; a single slow step is nobody's fault."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.in_a_row: dict[int, int] = {}
        self.step = -1

    def look(self, seen: Sequence[Seen]) -> list[int]:
        """Ranks that have just become stragglers. Looks once at each step."""
        steps = {one.step for one in seen}
        if len(seen) < 2 or len(steps) != 1 or steps == {self.step}:
            return []
        self.step = steps.pop()
        found = []
        for rank in range(len(seen)):
            slow = is_slow([one.busy_s for one in seen], rank, self.factor)
            self.in_a_row[rank] = self.in_a_row.get(rank, 0) + 1 if slow else 0
            if self.in_a_row[rank] == SLOW_STEPS:
                found.append(rank)
        return found


def is_slow(busy_s: Sequence[float], rank: int, factor: float) -> bool:
    others = [seconds for other, seconds in enumerate(busy_s) if other != rank]
    if not others:
        return False
    return busy_s[rank] > max(LEAST_BUSY_S, factor * statistics.median(others))
