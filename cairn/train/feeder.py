"""Has the next step's batches ready when they are asked for.

A sample is a pure function of its number, so what comes next is known: one thread makes it while the device computes.
Asking for something else (after a rewind) is no mistake; it is made at once. Knows nothing about the model.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from cairn.train.config import Train
from cairn.train.data.batch import Batch
from cairn.train.data.source import Source, microbatch, share


class Feeder:
    def __init__(
        self, source: Source, config: Train, rank: int, ranks: int, device: torch.device
    ) -> None:
        self.source, self.device = source, device
        self.per_step, self.size = config.data.sequences, config.data.microbatch
        self.rank, self.ranks = rank, ranks
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="feeder")
        self.ahead: tuple[int, Future[list[Batch]]] | None = None

    def batches(self, consumed: int) -> list[Batch]:
        """This rank's microbatches of the step that begins after `consumed` samples."""
        if self.ahead is not None and self.ahead[0] == consumed:
            made = self.ahead[1].result()
        else:
            made = self._make(consumed)
        following = consumed + self.per_step
        self.ahead = (following, self.pool.submit(self._make, following))
        return [batch.to(self.device) for batch in made]

    def close(self) -> None:
        self.pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, consumed: int) -> list[Batch]:
        numbers = share(consumed, self.rank, self.ranks, self.per_step)
        parts = [numbers[i : i + self.size] for i in range(0, len(numbers), self.size)]
        made = [microbatch(self.source, part) for part in parts]
        return [batch.pin() for batch in made] if self.device.type == "cuda" else made
