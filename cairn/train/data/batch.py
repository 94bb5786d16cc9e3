"""What one forward pass reads: packed tokens, what each should predict, and where documents begin.

There is no batch dimension: a microbatch is T = sequence_length * sequences tokens, documents side by side.

    tokens_T      The  cat  sat  <end> | Once  upon  a   | ...
    targets_T     cat  sat <end>  none | upon   a   time | ...      none = IGNORED: no loss
    positions_T    0    1    2     3   |  0     1    2   | ...
    lengths       [4, 3, ...]      cu_seqlens  [0, 4, 7, ...]

Knows nothing about where the tokens come from, nor who trains on them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the target of a token that has no loss, as torch's cross entropy wants it


class Batch(NamedTuple):
    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64, IGNORED where there is no loss
    positions_T: Tensor  # int64, from 0 in each document
    cu_seqlens: Tensor  # int32 [documents + 1], where each document begins and the last one ends
    lengths: list[int]  # the same on the host: tokens of each document
    ids: list[int]  # sample numbers, for the report of a bad step

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The same batch with its tensors on `device`."""
        return self._replace(
            tokens_T=self.tokens_T.to(device, non_blocking=non_blocking),
            targets_T=self.targets_T.to(device, non_blocking=non_blocking),
            positions_T=self.positions_T.to(device, non_blocking=non_blocking),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=non_blocking),
        )

    def pin(self) -> "Batch":
        """In page-locked memory, from which a copy to the GPU does not wait."""
        return self._replace(
            tokens_T=self.tokens_T.pin_memory(),
            targets_T=self.targets_T.pin_memory(),
            positions_T=self.positions_T.pin_memory(),
            cu_seqlens=self.cu_seqlens.pin_memory(),
        )

    def valid(self) -> int:
        """How many tokens have a loss."""
        return int((self.targets_T != IGNORED).sum())


def make_batch(
    tokens_T: Tensor, targets_T: Tensor, lengths: Sequence[int], ids: Sequence[int]
) -> Batch:
    """A batch with the positions and boundaries that these document lengths imply."""
    lengths = [int(length) for length in lengths]
    if sum(lengths) != len(tokens_T) or len(tokens_T) != len(targets_T) or min(lengths) < 1:
        raise ValueError(
            f"documents of {lengths} tokens do not make {len(tokens_T)} tokens and "
            f"{len(targets_T)} targets"
        )
    ends = torch.tensor([0, *lengths]).cumsum(0)
    starts_T = ends[:-1].repeat_interleave(ends.diff())
    return Batch(
        tokens_T=tokens_T.long(),
        targets_T=targets_T.long(),
        positions_T=torch.arange(len(tokens_T)) - starts_T,
        cu_seqlens=ends.int(),
        lengths=lengths,
        ids=list(ids),
    )


def join(batches: Sequence[Batch]) -> Batch:
    """Batches side by side as one; their documents stay apart."""
    if len(batches) == 1:
        return batches[0]
    lengths = [length for batch in batches for length in batch.lengths]
    return Batch(
        tokens_T=torch.cat([batch.tokens_T for batch in batches]),
        targets_T=torch.cat([batch.targets_T for batch in batches]),
        positions_T=torch.cat([batch.positions_T for batch in batches]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=lengths,
        ids=[id for batch in batches for id in batch.ids],
    )
