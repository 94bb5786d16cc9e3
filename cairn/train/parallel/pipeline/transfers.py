"""Pipeline schedule with explicit messages between ranks.

    rank 0   F0 send F1 send ......... receive B0 delivered(F0) ...
    rank 1   receive F0 receive B0 send F1 ...

A message is written into both ranks' lists at the moment it would leave, in the order of the simulated time. So all
messages have one order that both sides of each agree with, and even where a send waits for its receiver (NCCL) no two
ranks can wait for each other. `delivered` is written where the sender can tell from what it has received that the
receiver has used a message: its tensor may go, and nobody waits. Pure: lists in, lists out; `run` executes them.
"""

import math
from typing import Literal, NamedTuple

from cairn.train.parallel.pipeline.actions import Action, Schedule
from cairn.train.parallel.pipeline.simulate import ScheduleError, simulate


class Message(NamedTuple):
    """A tensor between two ranks: an activation (F) or its gradient (I)."""

    way: Literal["send", "receive", "delivered"]
    what: Literal["F", "I"]
    stage: int  # the stage that gets it
    microbatch: int
    peer: int  # the other rank

    def tag(self, microbatches: int) -> int:
        """The same number on both sides, and on no other message of the step."""
        return (self.stage * microbatches + self.microbatch) * 2 + (self.what == "I")

    @property
    def key(self) -> "Key":
        return self.what, self.stage, self.microbatch


Op = Action | Message
Key = tuple[str, int, int]  # of a message: F or I, the stage that gets it, microbatch


def with_messages(schedule: Schedule, first_trained: int = 0) -> list[list[Op]]:
    """Each rank's actions with its sends and receives between them.

    `first_trained`: the first stage with anything to train; no gradient goes to a stage before it.
    """
    timeline = simulate(schedule)
    size = len(schedule.ranks)
    ops: list[list[Op]] = [[] for _ in schedule.ranks]
    progress = _Progress(size)
    under_way: list[list[Message]] = [
        [] for _ in schedule.ranks
    ]  # not delivered yet, as far as the sender knows
    ran = [
        (r.end, r.start, rank, r.action)
        for rank, all_of in enumerate(timeline.ranks)
        for r in all_of
    ]
    for _, _, rank, action in sorted(ran, key=lambda entry: entry[:3]):
        ops[rank].append(action)
        at = schedule.stage_of(rank, action.chunk)
        progress.done(rank, ("F" if action.kind == "F" else "I", at, action.microbatch))
        delivered = [message for message in under_way[rank] if progress.knows(rank, message)]
        under_way[rank] = [message for message in under_way[rank] if message not in delivered]
        ops[rank] += [message._replace(way="delivered") for message in delivered]
        stage = following(schedule, rank, action)
        if stage is None or (action.kind != "F" and stage < first_trained):
            continue
        peer, _ = schedule.holder(stage)
        if peer != rank:
            what: Literal["F", "I"] = "F" if action.kind == "F" else "I"
            message = Message("send", what, stage, action.microbatch, peer)
            ops[rank].append(message)
            ops[peer].append(message._replace(way="receive", peer=rank))
            under_way[rank].append(message)
            progress.sent(rank, message)
    return ops


class _Progress:
    """Logical clocks: completed actions of each rank, as known to each rank from received messages."""

    def __init__(self, size: int) -> None:
        self.known = [[0] * size for _ in range(size)]
        self.told: dict[Key, list[int]] = {}  # what the sender of a message knew
        self.used: dict[Key, int] = {}  # which action of its receiver a message went into

    def done(self, rank: int, took: Key) -> None:
        """An action is over, into which this message went, if there was one."""
        known = self.known[rank]
        known[rank] += 1
        if took in self.told and took not in self.used:
            self.used[took] = known[rank]
            self.known[rank] = list(map(max, known, self.told[took]))

    def sent(self, rank: int, message: Message) -> None:
        self.told[message.key] = list(self.known[rank])

    def knows(self, rank: int, message: Message) -> bool:
        """Return whether the receiver has used a message that this rank sent."""
        return self.used.get(message.key, math.inf) <= self.known[rank][message.peer]


def following(schedule: Schedule, rank: int, action: Action) -> int | None:
    """The stage that waits for the result of an action."""
    stage = schedule.stage_of(rank, action.chunk)
    if action.kind == "F":
        return stage + 1 if stage + 1 < schedule.stages else None
    if action.kind in "BI":
        return stage - 1 if stage else None
    return None


def prove(ops: list[list[Op]]) -> int:
    """Runs the lists with sends that wait for their receivers; how many messages went. Raises if ranks block."""
    at = [0] * len(ops)
    messages = 0
    while True:
        moved = False
        for rank, todo in enumerate(ops):
            while at[rank] < len(todo):
                op = todo[at[rank]]
                if isinstance(op, Message) and op.way != "delivered":
                    other = ops[op.peer][at[op.peer]] if at[op.peer] < len(ops[op.peer]) else None
                    if not (isinstance(other, Message) and _match(op, rank, other)):
                        break
                    at[op.peer] += 1
                    messages += 1
                at[rank] += 1
                moved = True
        if not moved:
            break
    left = enumerate(zip(ops, at, strict=True))
    stuck = [f"rank {r} at {todo[i]}" for r, (todo, i) in left if i < len(todo)]
    if stuck:
        raise ScheduleError(f"messages block each other: {'; '.join(stuck)}")
    return messages


def _match(mine: Message, rank: int, other: Message) -> bool:
    ways = {mine.way, other.way} == {"send", "receive"}
    return ways and other.peer == rank and mine[1:4] == other[1:4]
