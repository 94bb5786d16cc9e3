"""When would each action of a schedule run, how long would ranks idle, and what would they keep in memory?

    start of an action = when its rank is free and what it needs is there

      F of a stage needs  F of the stage before          (from another rank: `send` later)
      B, I           need  B or I of the stage after, and its own F
      W              needs  its own I

Also proves a schedule: everything happens once, in an order that can run, or `ScheduleError` says who waits for
what. Times are in any unit; no torch, no clock, no rank is started.
"""

import msgspec

from cairn.core.errors import CairnError
from cairn.train.parallel.pipeline.actions import Action, Kind, Schedule


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Duration of a microbatch in a rank's share of the model; a chunk takes a part of it."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0
    send: float = 0.0  # between ranks, not hidden

    def of(self, kind: Kind, chunks: int) -> float:
        whole = {
            "F": self.forward,
            "B": self.input_gradient + self.weight_gradient,
            "I": self.input_gradient,
            "W": self.weight_gradient,
        }[kind]
        return whole / chunks


class TimedAction(msgspec.Struct, frozen=True):
    action: Action
    start: float
    end: float


class Timeline(msgspec.Struct, frozen=True):
    """Simulated timeline of a schedule."""

    ranks: list[list[TimedAction]]
    span: float  # from the first start to the last end
    idle: list[float]  # of each rank, within the span
    stash: list[
        float
    ]  # the most microbatches whose activations a rank keeps, in shares of its model
    weight_stash: list[float]  # of these, the most that wait for nothing but their weight gradients

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        return sum(self.idle) / (self.span * len(self.idle)) if self.span else 0.0


class ScheduleError(CairnError):
    """A schedule that cannot run: a bug in its generator."""


Key = tuple[Kind, int, int]  # kind (I for a whole backward too), stage, microbatch


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:  # noqa: B008
    """Runs the schedule on paper; raises ScheduleError if it is wrong or can never end."""
    check_complete(schedule)
    done: dict[Key, tuple[float, int]] = {}  # when, and on which rank
    ran: list[list[TimedAction]] = [[] for _ in schedule.ranks]
    free = [0.0] * schedule.size
    while True:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while len(ran[rank]) < len(actions):
                action = actions[len(ran[rank])]
                ready = _ready(schedule, rank, action, done, costs)
                if ready is None:
                    break
                start = max(free[rank], ready)
                end = start + costs.of(action.kind, schedule.chunks)
                ran[rank].append(TimedAction(action, start, end))
                _finish(schedule, rank, action, end, done)
                free[rank], moved = end, True
        if not moved:
            break
    _all_ran(schedule, ran, done)
    return _timeline(schedule, ran)


def needs(schedule: Schedule, rank: int, action: Action) -> list[Key]:
    """Dependencies of an action on all ranks."""
    stage, m = schedule.stage_of(rank, action.chunk), action.microbatch
    if action.kind == "F":
        return [("F", stage - 1, m)] if stage else []
    if action.kind == "W":
        return [("I", stage, m)]
    after: list[Key] = [("I", stage + 1, m)] if stage + 1 < schedule.stages else []
    return [("F", stage, m), *after]


def check_complete(schedule: Schedule) -> None:
    """Each stage does one F and one backward of each microbatch, whole or in both parts; or only F everywhere."""
    complete = ("F",) if schedule.is_forward_only() else ("FB", "FIW")
    for rank, actions in enumerate(schedule.ranks):
        if len(set(actions)) != len(actions):
            twice = next(a for a in actions if actions.count(a) > 1)
            raise ScheduleError(f"{schedule.name}: rank {rank} does {twice} twice")
        have = set(actions)
        for chunk in range(schedule.chunks):
            for m in range(schedule.microbatches):
                kinds = "".join(k for k in "FBIW" if Action(k, chunk, m) in have)  # type: ignore[arg-type]
                if kinds not in complete:
                    raise ScheduleError(
                        f"{schedule.name}: rank {rank} does {kinds or 'nothing'} of microbatch {m} "
                        f"in chunk {chunk}",
                        hint="it should be F and B, or F, I and W",
                    )
        if len(have) != sum(1 for a in have if a.microbatch < schedule.microbatches):
            raise ScheduleError(f"{schedule.name}: rank {rank} has microbatches that do not exist")


def _ready(
    schedule: Schedule, rank: int, action: Action, done: dict[Key, tuple[float, int]], costs: Costs
) -> float | None:
    """When all that an action needs is there; None: not known yet."""
    ready = 0.0
    for key in needs(schedule, rank, action):
        if key not in done:
            return None
        when, where = done[key]
        ready = max(ready, when + (costs.send if where != rank else 0.0))
    return ready


def _finish(
    schedule: Schedule, rank: int, action: Action, end: float, done: dict[Key, tuple[float, int]]
) -> None:
    kind = "I" if action.kind == "B" else action.kind
    done[kind, schedule.stage_of(rank, action.chunk), action.microbatch] = (end, rank)


def _all_ran(
    schedule: Schedule, ran: list[list[TimedAction]], done: dict[Key, tuple[float, int]]
) -> None:
    waits = []
    for rank, actions in enumerate(schedule.ranks):
        if len(ran[rank]) < len(actions):
            action = actions[len(ran[rank])]
            missing = [k for k in needs(schedule, rank, action) if k not in done]
            kind, stage, m = missing[0]
            waits.append(f"rank {rank} waits in {action} for {kind}{m} of stage {stage}")
    if waits:
        raise ScheduleError(f"{schedule.name} never ends: {'; '.join(waits)}")


def _timeline(schedule: Schedule, ran: list[list[TimedAction]]) -> Timeline:
    span = max(r.end for rank in ran for r in rank)
    busy = [sum(r.end - r.start for r in rank) for rank in ran]
    peaks = [_stash(actions) for actions in schedule.ranks]
    return Timeline(
        ranks=ran,
        span=span,
        idle=[span - b for b in busy],
        stash=[kept / schedule.chunks for kept, _ in peaks],
        weight_stash=[waiting / schedule.chunks for _, waiting in peaks],
    )


def _stash(actions: tuple[Action, ...]) -> tuple[int, int]:
    """The most activations kept at once, and the most of them that only W still needs."""
    kept = waiting = most = most_waiting = 0
    for action in actions:
        kept += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
        waiting += {"F": 0, "B": 0, "I": 1, "W": -1}[action.kind]
        most, most_waiting = max(most, kept), max(most_waiting, waiting)
    return most, most_waiting
