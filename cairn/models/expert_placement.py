"""Expert placement on ranks: placement and rebalancing from token counts, as pure functions.

    loads [E] --replicate--> how many copies of each --pack--> slots of every rank --moves--> what has to be copied

The heaviest expert per copy gets the next copy, and the heaviest copies go first, each to the rank with the least load
that has room and no copy of it yet. Tokens of an expert are shared evenly among its copies: token t goes to copy
t mod copies, so every rank knows it without asking. Pure Python: no torch, no process.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cairn.core.errors import ConfigError


class ExpertPlacement(msgspec.Struct, frozen=True):
    """The experts of each rank, in the order of its slots."""

    experts: int
    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        held = {expert for rank in self.ranks for expert in rank}
        if held != set(range(self.experts)):
            raise ConfigError(
                f"a placement of {len(held)} of {self.experts} experts",
                hint="every expert needs a slot on some rank",
            )

    def copies(self, expert: int) -> list[tuple[int, int]]:
        """Rank and slot of every copy, in the order of the ranks."""
        return [(r, rank.index(expert)) for r, rank in enumerate(self.ranks) if expert in rank]

    def slot(self, rank: int, expert: int, token: int) -> int:
        """Slot in which this rank computes an expert for a token; -1 if another rank does."""
        copies = self.copies(expert)
        holder, slot = copies[token % len(copies)]
        return slot if holder == rank else -1

    def loads(self, visits: Sequence[float]) -> list[float]:
        """Visits that each rank treats, if every copy of an expert gets as many."""
        copies = [len(self.copies(expert)) for expert in range(self.experts)]
        return [sum(visits[e] / copies[e] for e in rank) for rank in self.ranks]


class ExpertMove(NamedTuple):
    """A slot that is filled with another expert, from a rank that has it; None: it is here in another slot."""

    rank: int
    slot: int
    expert: int
    source: int | None


def evenly(experts: int, ranks: int) -> ExpertPlacement:
    """Neighbours together and no copies, as many on each rank as on any other or one more."""
    if not 1 <= ranks <= experts:
        raise ConfigError(
            f"{experts} experts cannot be spread over {ranks} ranks",
            hint="every rank holds at least one expert",
        )
    bounds = [rank * experts // ranks for rank in range(ranks + 1)]
    return ExpertPlacement(
        experts, tuple(tuple(range(a, b)) for a, b in itertools.pairwise(bounds))
    )


def place(visits: Sequence[float], ranks: int, slots: int) -> ExpertPlacement:
    """Experts on ranks with so many slots each, so that the busiest rank has as little as possible to do."""
    experts = len(visits)
    if ranks < 1 or not experts <= ranks * slots:
        raise ConfigError(
            f"{experts} experts on {ranks} ranks of {slots} slots",
            hint="every expert needs a slot",
        )
    copies = _copies(visits, ranks, slots)
    heavy_first = sorted(range(experts), key=lambda e: -visits[e] / copies[e])
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for expert in heavy_first:
        for _ in range(copies[expert]):
            able = [r for r in range(ranks) if len(held[r]) < slots and expert not in held[r]]
            if not able:  # all room is on ranks that have one already: it does without this copy
                continue
            rank = min(able, key=lambda r: (load[r], r))
            held[rank].append(expert)
            load[rank] += visits[expert] / copies[expert]
    return ExpertPlacement(experts, tuple(tuple(rank) for rank in held))


def _copies(visits: Sequence[float], ranks: int, slots: int) -> list[int]:
    """Number of copies of each expert: one, and the remaining slots to those with most tokens per copy."""
    copies = [1] * len(visits)
    for _ in range(ranks * slots - len(visits)):
        able = [e for e in range(len(visits)) if copies[e] < ranks]
        if not able:
            break
        copies[max(able, key=lambda e: (visits[e] / copies[e], -e))] += 1
    return copies


def rebalance(
    old: ExpertPlacement, visits: Sequence[float], *, at_least: float = 1.1
) -> tuple[ExpertPlacement, list[ExpertMove]]:
    """A better placement and what it takes to get there; the old one while its busiest rank is near the mean."""
    loads = old.loads(visits)
    mean = sum(loads) / len(loads)
    if not mean or max(loads) <= at_least * mean:
        return old, []
    slots = max(len(rank) for rank in old.ranks)
    new = _keep_slots(old, place(visits, len(old.ranks), slots))
    if max(new.loads(visits)) >= max(loads):
        return old, []
    return new, moves(old, new)


def _keep_slots(old: ExpertPlacement, new: ExpertPlacement) -> ExpertPlacement:
    """The same experts on each rank, those that were there in the slots that they have."""
    ranks = []
    for before, after in zip(old.ranks, new.ranks, strict=True):
        coming = [expert for expert in after if expert not in before]
        experts = [expert if expert in after else None for expert in before[: len(after)]]
        experts += [None] * (len(after) - len(experts))
        lost = [e for e in before[len(after) :] if e in after]
        rest = iter([*lost, *coming])
        ranks.append(tuple(next(rest) if expert is None else expert for expert in experts))
    return ExpertPlacement(new.experts, tuple(ranks))


def moves(old: ExpertPlacement, new: ExpertPlacement) -> list[ExpertMove]:
    """Slots that change; an expert comes from this rank if it is here, else from its first holder."""
    moves = []
    for rank, (before, after) in enumerate(zip(old.ranks, new.ranks, strict=True)):
        for slot, expert in enumerate(after):
            if slot < len(before) and before[slot] == expert:
                continue
            here = expert in before
            moves.append(ExpertMove(rank, slot, expert, None if here else old.copies(expert)[0][0]))
    return moves
