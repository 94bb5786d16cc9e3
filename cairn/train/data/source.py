"""Interface of data sources, and the samples of each rank.

A source is a pure function: sample `number` is the same on every rank, in every layout, after every restart.
So the state of the data in a checkpoint is one integer, the samples consumed so far, and any number of ranks
can go on from it.

    step 3, 8 samples per step        consumed 24
      2 ranks                         24 25 26 27 | 28 29 30 31
      4 ranks                         24 25 | 26 27 | 28 29 | 30 31       the same stream

Knows nothing about files or shuffling: a source may be a store, a blend of sources, or a grammar.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cairn.core.errors import ConfigError

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch


class Source(Protocol):
    @property
    def sequence_length(self) -> int:
        """Tokens in every sample."""
        ...

    @property
    def samples_per_epoch(self) -> int | None:
        """Number of different samples; None for endless sources."""
        ...

    @property
    def fingerprint(self) -> str:
        """Identity of the stream for checkpoints; resuming with a different one would not be exact."""
        ...

    def batch(self, number: int) -> "Batch":
        """Sample `number`, from 0 without end; a pure function."""
        ...


def samples(step: int, rank: int, ranks: int, per_step: int) -> range:
    """The sample numbers that `rank` of `ranks` takes in `step`, when every step takes `per_step`."""
    return share(step * per_step, rank, ranks, per_step)


def share(consumed: int, rank: int, ranks: int, per_step: int) -> range:
    """A rank's slice of the next `per_step` samples, after `consumed` of them."""
    if per_step < 1 or ranks < 1 or per_step % ranks:
        raise ConfigError(
            f"{per_step} samples per step do not divide over {ranks} data ranks",
            hint=f"take {max(1, round(per_step / max(1, ranks))) * max(1, ranks)} samples per step",
        )
    if not 0 <= rank < ranks or consumed < 0:
        raise ConfigError(
            f"there is no data rank {rank} of {ranks} after {consumed} samples",
            hint="ranks count from 0, samples too",
        )
    each = per_step // ranks
    return range(consumed + rank * each, consumed + (rank + 1) * each)


def cut(part: float, samples: int) -> int:
    """Convert a fraction of a source to a sample index.

    Either side keeps one sample at least, where there are two: a held-out share of 5% exists for small texts, too.
    """
    if part in (0.0, 1.0) or samples < 2:
        return round(part * samples)
    return min(max(round(part * samples), 1), samples - 1)


def microbatch(source: Source, numbers: Sequence[int]) -> "Batch":
    """Several samples side by side, in the order of their numbers."""
    from cairn.train.data.batch import join

    return join([source.batch(number) for number in numbers])
