"""Is it right? A proof by running the schedule on sets instead of numbers.

A chunk is the set of ranks that are summed in it (`contract`). A send carries a set, a reduction
joins two. Then:

    every contribution once       a reduction of sets that overlap counts a rank twice: refused
    the right result              at the end every slot that matters has exactly the set it must have
    nothing invented              a slot that holds nothing is never read
    no hang                       under connections that hold `capacity` chunks: the graph of waits
                                  (`waits`) has no cycle, or the run would stop before the end
    any order, one result         threads of a rank that touch one slot are ordered by `after`, so no
                                  interleaving can give another result (an order that comes about by
                                  messages through other ranks is not enough: it has to be written)

and what it costs, in units of the vector: the traffic of the busiest rank against the fewest there
can be, the number of waits for the wire one after another, the messages of the busiest rank.

It is a proof for these ranks and chunks, for every input and every timing. Many schedules are proved
in one pass. Knows nothing about time in seconds; `cost` does.
"""

import msgspec
import numpy as np

from cairn.comm.schedule import contract, waits
from cairn.comm.schedule.ops import Collective, CollectiveSchedule, OpKind, ScheduleError
from cairn.comm.schedule.symbolic import SymbolicRun

LARGEST_CAPACITY = 64  # chunks of one connection; a schedule that needs more is called a hang


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    collective: Collective
    ranks: int
    chunks: int
    problem: str | None = None
    steps: int = 0  # waits for the wire, one after another
    messages: int = 0  # sent by the busiest rank
    traffic: float = 0.0  # vectors moved by the busiest rank, in its busier direction
    bound: float = 0.0  # no schedule can do with less
    capacity: int = 1  # chunks that each connection must hold
    staging: int = 0  # chunks of buffer besides input and output
    operations: int = 0

    @property
    def ok(self) -> bool:
        return self.problem is None

    @property
    def times_bound(self) -> float:
        """1.0: it moves the fewest bytes there can be."""
        return self.traffic / self.bound if self.bound else 1.0


def verify(schedule: CollectiveSchedule, capacity: int | None = None) -> Proof:
    """Proves one schedule; without `capacity` it finds the least one that does not hang."""
    return verify_all([schedule], capacity)[0]


def require(schedule: CollectiveSchedule, capacity: int | None = None) -> Proof:
    """The proof, or an error that says what is wrong."""
    proof = verify(schedule, capacity)
    if proof.problem is not None:
        raise ScheduleError(f"{schedule.name} on {schedule.ranks} ranks: {proof.problem}")
    return proof


def verify_all(schedules: list[CollectiveSchedule], capacity: int | None = None) -> list[Proof]:
    """Verify all schedules and return their proofs in order; a schedule that fails does not stop the others."""
    if capacity is not None and capacity < 1:
        raise ScheduleError(f"connections that hold {capacity} chunks", hint="use 1 or more")
    proofs: dict[int, Proof] = {}
    todo = []
    for index, schedule in enumerate(schedules):
        problem = contract.shape_problem(schedule) or waits.columns_are_sound(schedule)
        if problem is not None:
            proofs[index] = _proof(schedule, problem=problem)
        else:
            todo.append(index)
    trying = capacity or 1
    while todo:
        run = SymbolicRun([schedules[index] for index in todo], trying)
        run.check()
        stuck = []
        for place, index in enumerate(todo):
            if place in run.stuck and capacity is None and trying < LARGEST_CAPACITY:
                stuck.append(index)
            else:
                proofs[index] = _proof_of(run, place)
        todo, trying = stuck, trying * 2
    return [proofs[index] for index in range(len(schedules))]


def _proof_of(run: SymbolicRun, index: int) -> Proof:
    """The cost and the violations of one schedule of the run."""
    ops, schedule = run.ops, run.schedules[index]
    mine = slice(int(ops.first_op[index]), int(ops.first_op[index + 1]))
    base = int(ops.first_rank[index])
    sends = ops.kind[mine] == int(OpKind.SEND)
    source, target = ops.rank[mine][sends] - base, ops.peer[mine][sends] - base
    sent = np.bincount(source, minlength=schedule.nodes)[: schedule.ranks]
    received = np.bincount(target, minlength=schedule.nodes)[: schedule.ranks]
    steps = int(ops.step[mine].max(initial=0)) + 1
    line = (source * schedule.nodes + target) * schedule.channels + ops.channel[mine][sends]
    message = np.unique(line * steps + ops.step[mine][sends])
    sender = message // (steps * schedule.channels * schedule.nodes)
    messages = np.bincount(sender, minlength=schedule.nodes)[: schedule.ranks]
    return _proof(
        schedule,
        problem=run.problems.get(index),
        steps=int(run.time[:-1][mine].max(initial=0)),
        messages=int(messages.max(initial=0)),
        traffic=int(np.maximum(sent, received).max(initial=0)) / schedule.chunks,
        capacity=run.capacity,
    )


def _proof(schedule: CollectiveSchedule, **found: object) -> Proof:
    used = schedule.chunks * (2 if schedule.collective == "all_to_all" else 1)
    return Proof(
        name=schedule.name,
        collective=schedule.collective,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        bound=contract.fewest_chunks(schedule) / max(schedule.chunks, 1),
        staging=schedule.slots - used,
        operations=schedule.operations,
        **found,  # pyrefly: ignore
    )
