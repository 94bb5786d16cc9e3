"""Tensor-parallel shards: the slice of each rank, and the collectives that join the results.

Tensor parallelism as four verbs that the layers call; who carries them out is injected, so the same layer
runs alone, under autograd over gloo or NCCL, or inside a CUDA graph. This module knows no backend.

    x -enter-> columns: each rank its rows of W -> ... -> rows: each rank its columns of W -reduce-> y
"""

from typing import Protocol

from torch import Tensor

from cairn.core.errors import ConfigError


class Shards(Protocol):
    """Rank of a tensor-parallel group of `size`. f and g are Megatron's operators (arXiv:1909.08053)."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def enter(self, x: Tensor) -> Tensor:
        """f: x unchanged; in backward, gradients of all ranks are summed."""
        ...

    def reduce(self, x: Tensor) -> Tensor:
        """g: the sum over ranks; in backward, the gradient unchanged."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' last dimensions side by side; in backward, each rank takes its own slice."""
        ...

    def whole(self, weight: Tensor) -> Tensor:
        """A weight that every rank holds whole and uses for its slice: unchanged; its gradients are summed."""
        ...


class Alone:
    """The only rank: nothing to join."""

    rank = 0
    size = 1

    def enter(self, x: Tensor) -> Tensor:
        return x

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x

    def whole(self, weight: Tensor) -> Tensor:
        return weight


ALONE = Alone()


def even_share(total: int, shards: Shards, what: str) -> int:
    """This rank's part of `total`, which has to divide evenly."""
    if total % shards.size:
        fits = max(n for n in range(1, shards.size) if total % n == 0)
        raise ConfigError(
            f"tensor parallel {shards.size} does not divide {total} {what}",
            hint=f"use tensor parallel {fits}, the largest below {shards.size} that does",
        )
    return total // shards.size
