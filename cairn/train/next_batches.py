"""Batches of each step for the loop: prefetched from a pure source, or produced by another provider.

    loop --next_batches(state)--> [Batch, ...]      this data rank's microbatches; none is an answer, too

Over a pure source (`data.source`) a step's samples are a function of how many have been consumed, so they are made one
step ahead in a thread, a resumed run goes on exactly where it was, and asking for something else (after a rewind) is no
mistake. Another source, such as rollouts of the model that is trained, implements `NextBatches`. If what it does next
depends on more than the training state, it is a `StatefulBatches`, and checkpoints keep its state.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from cairn.core.errors import DataError
from cairn.train.config import Train
from cairn.train.data.batch import Batch
from cairn.train.data.source import Source, microbatch, share

if TYPE_CHECKING:
    from cairn.train.state import TrainState


@runtime_checkable
class NextBatches(Protocol):
    @property
    def fingerprint(self) -> str:
        """Identity of the batches for checkpoints; see `Source.fingerprint`."""
        ...

    @property
    def may_be_empty(self) -> bool:
        """Return whether a step may have no batches, which the ranks then agree on before each step."""
        ...

    def next_batches(self, state: "TrainState") -> list[Batch]:
        """This data rank's microbatches of the step that comes, on the device; alike on all its tp, pp and cp ranks.

        With fsdp, pp, ep or zero 2 all data ranks have equally many.
        """
        ...

    def close(self) -> None:
        """Release resources after the last step."""
        ...


@runtime_checkable
class StatefulBatches(Protocol):
    """Additional interface of a `NextBatches` with a state."""

    def state_dict(self) -> dict[str, Any]:
        """State of this data rank after the batches so far, as JSON types, equal on all its tp, pp and cp ranks."""
        ...

    def load_state_dict(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from there. `states`: of all data ranks that saved, in order; there may be more or fewer ranks now."""
        ...


class SourceBatches:
    """Batches of a pure source, made one step ahead."""

    may_be_empty = False

    def __init__(
        self, source: Source, config: Train, rank: int, ranks: int, device: torch.device
    ) -> None:
        self.source, self.device = source, device
        self.per_step, self.size = config.data.sequences, config.data.microbatch
        self.rank, self.ranks = rank, ranks
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.ahead: tuple[int, Future[list[Batch]]] | None = None

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def next_batches(self, state: "TrainState") -> list[Batch]:
        return self.after(state.samples)

    def after(self, consumed: int) -> list[Batch]:
        """This rank's microbatches of the step that begins after `consumed` samples."""
        if self.ahead is not None and self.ahead[0] == consumed:
            batches = self.ahead[1].result()
        else:  # by the same thread: a source may remember what it read last
            batches = self.pool.submit(self._make, consumed).result()
        following = consumed + self.per_step
        self.ahead = (following, self.pool.submit(self._make, following))
        return [batch.to(self.device) for batch in batches]

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, consumed: int) -> list[Batch]:
        numbers = share(consumed, self.rank, self.ranks, self.per_step)
        parts = [numbers[i : i + self.size] for i in range(0, len(numbers), self.size)]
        batches = [microbatch(self.source, part) for part in parts]
        return [batch.pin() for batch in batches] if self.device.type == "cuda" else batches


def check_counts(fewest: int, most: int, config: Train) -> None:
    """Refuses ranks with different numbers of batches where they compute together."""
    layout = config.parallel
    together = {"fsdp": layout.fsdp, "pp": layout.pp, "ep": layout.ep, "zero": config.strategy.zero}
    why = [name for name, size in together.items() if size > 1]
    if fewest != most and why:
        raise DataError(
            f"data ranks have {fewest} to {most} batches in one step, but with {' and '.join(why)} they need "
            "equally many",
            hint="let the source divide its samples evenly, or use dp alone",
        )
