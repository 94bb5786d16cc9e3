"""A mixer that carries a state along the sequence instead of looking back at earlier tokens.

    several    some tokens of one sequence, in one go      prefill, training
    single     one token of each of several sequences      decode
    in_slots   any tokens of any sequences, by kernels that change states where they lie: a GPU

All compute the same up to the order of sums. `attend` decides where states live, as with keys: `PackedDocuments`
begins each document with an empty one, `Cached` and the engine's pages keep one for each sequence. A state is as large
after one token as after a million, and the state before a token cannot be recovered afterwards.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.kernels.delta.rule import Sequences
from cairn.models.mixer import Plane

Planes = tuple[Tensor, ...]  # of a state: [heads, width], or of several states [B, heads, width]


class Recurrence(Protocol):
    """Recurrence of a layer; the first dimension of its inputs is the tokens."""

    layer: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Planes of the state."""
        ...

    def several(self, inputs: Planes, state: Planes) -> tuple[Tensor, Planes]:
        """Outputs [S, ...] of one sequence's tokens, and the state behind them."""
        ...

    def single(self, inputs: Planes, states: Planes) -> tuple[Tensor, Planes]:
        """Outputs [B, ...] of one token of each sequence, and their states behind it."""
        ...

    @property
    def has_kernels(self) -> bool:
        """Return whether `in_slots` supports these sizes."""
        ...

    def in_slots(self, inputs: Planes, planes: Planes, sequences: Sequences) -> Tensor:
        """Outputs [T, ...] of all sequences of a step; `planes`: [slots, heads, width] each."""
        ...


@runtime_checkable
class KeepsStates(Protocol):
    """An attend that knows where its sequences begin and end, and which state each has."""

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Advance the state of every sequence by its tokens; outputs [T, ...]."""
        ...


def recur(attend: object, rule: Recurrence, inputs: Planes) -> Tensor:
    if not isinstance(attend, KeepsStates):
        raise ConfigError(
            f"{type(attend).__name__} carries no state along a sequence, and layer {rule.layer} has one",
            hint="such layers run without context parallelism",
        )
    return attend.recur(rule, inputs)


def empty_state(
    planes: Sequence[Plane], dtype: torch.dtype, device: torch.device | str, *leading: int
) -> Planes:
    """Zeros; planes of four bytes are float32 whatever the model's type is."""
    return tuple(
        torch.zeros(
            *leading, plane.heads, plane.width, dtype=plane_type(plane, dtype), device=device
        )
        for plane in planes
    )


def plane_type(plane: Plane, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if plane.value_bytes == 4 else dtype
