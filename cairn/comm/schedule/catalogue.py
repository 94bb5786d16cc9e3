"""Every schedule by name: `make("all_reduce", "ring", ranks=8)`.

    all_reduce       ring  tree  halving_doubling  bruck  pat  one_shot  two_shot  two_level  sparse  switch
    all_gather       ring  bruck  pat  direct  two_level            (and each of them backwards is a
    reduce_scatter   ring  bruck  pat  direct  two_level             reduce_scatter, both an all_reduce)
    all_to_all       pairwise  bruck  two_hop
    broadcast        chain  binomial  tree
    reduce           chain  binomial  tree

`parts` cuts every chunk further and deals the parts out to `channels`; trees, chains and the switch
pipeline over `chunks` instead. Knows which names there are, and nothing about how they work.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cairn.comm.schedule.aggregate import switch_all_reduce
from cairn.comm.schedule.algorithms import (
    bruck_all_to_all,
    bruck_gather,
    chain_broadcast,
    direct_gather,
    halving_doubling,
    one_shot_all_reduce,
    pairwise_all_to_all,
    ring_gather,
)
from cairn.comm.schedule.hierarchical import two_hop_all_to_all, two_level_gather
from cairn.comm.schedule.ops import Collective, CollectiveSchedule, ScheduleError
from cairn.comm.schedule.pat import pat_gather
from cairn.comm.schedule.plan import SchedulePlan
from cairn.comm.schedule.sparse import example_blocks, sparse_all_reduce
from cairn.comm.schedule.tree import (
    binomial_broadcast,
    double_tree_all_reduce,
    double_tree_broadcast,
)
from cairn.core.errors import did_you_mean


class ScheduleShape(NamedTuple):
    """Parameters of a schedule; each generator uses those that apply to it."""

    ranks: int
    parts: int = 1  # of every chunk
    channels: int = 1  # over which parts are dealt out
    chunks: int = 4  # of a pipeline: tree, chain, switch
    root: int = 0
    gpus: int | None = None  # of a node; None: the largest of 1..8 that fits
    aggregate: int | None = None  # chunks of a PAT message; None: no limit
    pool: int = 2  # slots of the switch
    present: np.ndarray | None = None  # blocks that are not zero; None: an example


class Generated(NamedTuple):
    plan: SchedulePlan
    chunks: int
    slots: int
    nodes: int | None = None
    present: np.ndarray | None = None


Generator = Callable[[ScheduleShape], Generated]
GATHERS: dict[str, Callable[[ScheduleShape], SchedulePlan]] = {
    "ring": lambda shape: ring_gather(shape.ranks),
    "bruck": lambda shape: bruck_gather(shape.ranks),
    "pat": lambda shape: pat_gather(shape.ranks, shape.aggregate),
    "direct": lambda shape: direct_gather(shape.ranks),
    "two_level": lambda shape: two_level_gather(shape.ranks, shape.gpus),
}
BROADCASTS: dict[str, Callable[[ScheduleShape], tuple[SchedulePlan, int]]] = {
    "chain": lambda s: (chain_broadcast(s.ranks, s.chunks, s.root), s.chunks),
    "binomial": lambda s: (binomial_broadcast(s.ranks, s.root), 1),
    "tree": lambda s: (double_tree_broadcast(s.ranks, s.chunks, s.root), s.chunks),
}
TWO_SHOT = "two_shot"  # what the two halves of a direct exchange are called together


def make(collective: Collective, name: str, ranks: int, **shape: object) -> CollectiveSchedule:
    """The schedule `name` of a collective; see `ScheduleShape` for what can be asked."""
    settings = ScheduleShape(ranks, **shape)  # pyrefly: ignore
    _check(settings)
    lowered = _generator(collective, name)(settings)
    plan = lowered.plan.split(settings.parts, settings.channels)
    present = lowered.present
    return plan.lower(
        name,
        collective,
        chunks=lowered.chunks * settings.parts,
        slots=lowered.slots * settings.parts,
        nodes=lowered.nodes,
        root=settings.root,
        present=None if present is None else np.repeat(present, settings.parts, axis=1),
    )


def names() -> list[tuple[Collective, str]]:
    """Every collective and schedule there is."""
    return [(collective, name) for collective, table in _tables().items() for name in table]


def _tables() -> dict[Collective, dict[str, Generator]]:
    rows: dict[Collective, dict[str, Generator]] = {
        "all_reduce": {
            **{TWO_SHOT if name == "direct" else name: _both(name) for name in GATHERS},
            "one_shot": _one_shot,
            "tree": lambda s: Generated(
                double_tree_all_reduce(s.ranks, s.chunks), s.chunks, s.chunks
            ),
            "halving_doubling": _halving,
            "sparse": _sparse,
            "switch": _switch,
        },
        "all_gather": {name: _gather(name) for name in GATHERS},
        "reduce_scatter": {name: _scatter(name) for name in GATHERS},
        "all_to_all": {
            "pairwise": lambda s: _exchange(s, pairwise_all_to_all(s.ranks)),
            "bruck": lambda s: _exchange(s, bruck_all_to_all(s.ranks)),
            "two_hop": lambda s: _exchange(s, two_hop_all_to_all(s.ranks, s.gpus)),
        },
        "broadcast": {name: _spread(name) for name in BROADCASTS},
        "reduce": {name: _collect(name) for name in BROADCASTS},
    }
    return rows


def _generator(collective: Collective, name: str) -> Generator:
    tables = _tables()
    if collective not in tables:
        raise ScheduleError(
            f"unknown collective '{collective}'", hint=did_you_mean(collective, tables)
        )
    schedules = tables[collective]
    if name not in schedules:
        there = f"there are: {', '.join(schedules)}"
        raise ScheduleError(
            f"{collective} has no schedule '{name}'", hint=did_you_mean(name, schedules, there)
        )
    return schedules[name]


def _check(shape: ScheduleShape) -> None:
    for field in ("ranks", "parts", "channels", "chunks", "pool"):
        value = getattr(shape, field)
        if value < 1:
            raise ScheduleError(f"{field} is {value}", hint="it must be 1 or more")
    if not 0 <= shape.root < shape.ranks:
        raise ScheduleError(f"rank {shape.root} of {shape.ranks} cannot be the root")


def _gather(name: str) -> Generator:
    return lambda shape: Generated(GATHERS[name](shape), shape.ranks, shape.ranks)


def _scatter(name: str) -> Generator:
    return lambda shape: Generated(GATHERS[name](shape).reversed(), shape.ranks, shape.ranks)


def _both(name: str) -> Generator:
    def generate(shape: ScheduleShape) -> Generated:
        gather = GATHERS[name](shape)
        return Generated(gather.reversed().then(gather), shape.ranks, shape.ranks)

    return generate


def _spread(name: str) -> Generator:
    def generate(shape: ScheduleShape) -> Generated:
        plan, chunks = BROADCASTS[name](shape)
        return Generated(plan, chunks, chunks)

    return generate


def _collect(name: str) -> Generator:
    def generate(shape: ScheduleShape) -> Generated:
        plan, chunks = BROADCASTS[name](shape)
        return Generated(plan.reversed(), chunks, chunks)

    return generate


def _exchange(shape: ScheduleShape, plan_and_slots: tuple[SchedulePlan, int]) -> Generated:
    return Generated(plan_and_slots[0], shape.ranks, plan_and_slots[1])


def _one_shot(shape: ScheduleShape) -> Generated:
    plan, slots = one_shot_all_reduce(shape.ranks)
    return Generated(plan, 1, slots)


def _halving(shape: ScheduleShape) -> Generated:
    plan, chunks = halving_doubling(shape.ranks)
    return Generated(plan, chunks, chunks)


def _sparse(shape: ScheduleShape) -> Generated:
    present = shape.present
    if present is None:
        present = example_blocks(shape.ranks, shape.ranks)
    if present.shape[0] != shape.ranks:
        raise ScheduleError(
            f"the map of blocks has {present.shape[0]} rows for {shape.ranks} ranks",
            hint="it is [ranks, blocks]",
        )
    blocks = present.shape[1]
    return Generated(sparse_all_reduce(present), blocks, blocks, present=present)


def _switch(shape: ScheduleShape) -> Generated:
    plan = switch_all_reduce(shape.ranks, shape.chunks, shape.pool)
    slots = max(shape.chunks, shape.pool)
    return Generated(plan, shape.chunks, slots, nodes=shape.ranks + 1)
