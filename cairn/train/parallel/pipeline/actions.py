"""A pipeline schedule as data: what each rank does, in order.

    F  forward of one microbatch through one stage
    B  its whole backward, or in two parts:
    I  gradients of the inputs, which the stage before is waiting for
    W  gradients of the weights, which are not needed until the end of the step

A rank holds one stage, or several `chunks` of the model. Which stage a chunk is depends on the `placement`:

    loop   rank 0: 0 4   rank 1: 1 5   rank 2: 2 6   rank 3: 3 7      after the last rank comes the first
    v      rank 0: 0 7   rank 1: 1 6   rank 2: 2 5   rank 3: 3 4      down to the last rank and up again

Lists and numbers only. `orders`, `zero_bubble` and `dualpipe` write schedules, `simulate` times and proves them,
`run` executes them; none of them knows how another works.
"""

from typing import Literal, NamedTuple

import msgspec

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]


class Action(NamedTuple):
    kind: Kind
    chunk: int  # which of this rank's stages
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + ("'" * self.chunk)


class Schedule(msgspec.Struct, frozen=True):
    """Every rank's actions for one step."""

    name: str
    microbatches: int
    ranks: tuple[tuple[Action, ...], ...]  # [rank][order]
    chunks: int = 1
    placement: Placement = "loop"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def stages(self) -> int:
        return self.size * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        return stage_of(self.placement, self.size, rank, chunk)

    def holder(self, stage: int) -> tuple[int, int]:
        """Rank of a stage, and the chunk index on it."""
        return holder(self.placement, self.size, stage)

    def splits_backward(self) -> bool:
        return any(action.kind == "W" for rank in self.ranks for action in rank)

    def is_forward_only(self) -> bool:
        """Return whether there is no backward: validation, log probabilities of a reference."""
        return all(action.kind == "F" for rank in self.ranks for action in rank)


def stage_of(placement: Placement, size: int, rank: int, chunk: int) -> int:
    if placement == "v" and chunk % 2:
        return (chunk + 1) * size - 1 - rank
    return chunk * size + rank


def holder(placement: Placement, size: int, stage: int) -> tuple[int, int]:
    chunk, place = divmod(stage, size)
    return (size - 1 - place if placement == "v" and chunk % 2 else place), chunk


class Counter:
    """Numbers the actions: the next forward of a chunk is of its next microbatch, and so on for each kind."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._next: dict[tuple[str, int], int] = {}

    def add(self, kind: Kind, chunk: int = 0) -> None:
        number = self.count(kind, chunk)
        self.actions.append(Action(kind, chunk, number))
        for part in "IW" if kind == "B" else kind:  # a whole backward is both of its parts
            self._next[part, chunk] = number + 1

    def count(self, kind: Kind, chunk: int = 0) -> int:
        """Number of actions of this kind so far."""
        return self._next.get(("I" if kind == "B" else kind, chunk), 0)
