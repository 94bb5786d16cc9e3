"""Input of a forward pass: packed tokens, their targets, and document boundaries.

There is no batch dimension: a microbatch is T = sequence_length * sequences tokens, documents side by side.

    tokens_T      The  cat  sat  <end> | Once  upon  a   | ...
    targets_T     cat  sat <end>  none | upon   a   time | ...      none = IGNORED: no loss
    positions_T    0    1    2     3   |  0     1    2   | ...
    lengths       [4, 3, ...]      cu_seqlens  [0, 4, 7, ...]
    extra         other streams, one row for each token: rewards, weights, log-probabilities of a reference

A document may go on where another one of the batch ends (`prefixes`): answers behind one prompt, which is there once.

    prompt | an answer | another answer | ...       prefixes [NONE, 0, 0, ...]; positions of answers go on

Knows nothing about where the tokens come from, nor who trains on them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

IGNORED = -100  # the target of a token that has no loss, as torch's cross entropy wants it
NONE = -1  # the prefix of a document that begins by itself


class Batch(NamedTuple):
    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64, IGNORED where there is no loss
    positions_T: Tensor  # int64, from 0 in each document, or from the end of its prefix
    cu_seqlens: Tensor  # int32 [documents + 1], where each document begins and the last one ends
    lengths: list[int]  # the same on the host: tokens of each document
    ids: list[int]  # sample numbers, for the report of a bad step
    extra: dict[str, Tensor] = {}  # noqa: RUF012 (never written to): streams [T, ...] by name
    # Of each document the number of the one that it goes on from, or NONE; empty: none has one.
    prefixes: tuple[int, ...] = ()

    def to(self, device: torch.device | str, non_blocking: bool = True) -> "Batch":
        """The same batch with its tensors on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin(self) -> "Batch":
        """Copy to pinned memory for asynchronous transfers to the GPU."""
        return self._with_tensors(Tensor.pin_memory)

    def at(self, tokens_T: Tensor) -> "Batch":
        """Only these tokens, by index, with their streams; `lengths` and `cu_seqlens` stay those of the whole."""
        return self._replace(
            tokens_T=self.tokens_T[tokens_T],
            targets_T=self.targets_T[tokens_T],
            positions_T=self.positions_T[tokens_T],
            extra={name: stream[tokens_T] for name, stream in self.extra.items()},
        )

    def prefix_lengths(self) -> list[int]:
        """Tokens of the document that each one goes on from; 0: it begins by itself."""
        prefixes = self.prefixes or [NONE] * len(self.lengths)
        return [0 if prefix == NONE else self.lengths[prefix] for prefix in prefixes]

    def valid(self) -> int:
        """Number of tokens with a loss."""
        return int((self.targets_T != IGNORED).sum())

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        return self._replace(
            tokens_T=change(self.tokens_T),
            targets_T=change(self.targets_T),
            positions_T=change(self.positions_T),
            cu_seqlens=change(self.cu_seqlens),
            extra={name: change(stream) for name, stream in self.extra.items()},
        )


class Document(NamedTuple):
    """A document of a packed batch with its targets."""

    tokens_T: Tensor
    targets_T: Tensor
    extra: Mapping[str, Tensor] = {}


def make_batch(
    tokens_T: Tensor,
    targets_T: Tensor,
    lengths: Sequence[int],
    ids: Sequence[int],
    extra: Mapping[str, Tensor] | None = None,
    prefixes: Sequence[int] = (),
) -> Batch:
    """A batch with the positions and boundaries that these document lengths imply."""
    lengths = [int(length) for length in lengths]
    if sum(lengths) != len(tokens_T) or len(tokens_T) != len(targets_T) or min(lengths) < 1:
        raise ValueError(
            f"documents of {lengths} tokens do not make {len(tokens_T)} tokens and "
            f"{len(targets_T)} targets"
        )
    streams = dict(extra or {})
    for name, stream in streams.items():
        if len(stream) != len(tokens_T):
            raise ValueError(f"stream {name} has {len(stream)} rows for {len(tokens_T)} tokens")
    ends = torch.tensor([0, *lengths]).cumsum(0)
    before = [0 if one == NONE else lengths[one] for one in prefixes] or [0] * len(lengths)
    starts_T = (ends[:-1] - torch.tensor(before)).repeat_interleave(ends.diff())
    return Batch(
        tokens_T=tokens_T.long(),
        targets_T=targets_T.long(),
        positions_T=torch.arange(len(tokens_T)) - starts_T,
        cu_seqlens=ends.int(),
        lengths=lengths,
        ids=list(ids),
        extra=streams,
        prefixes=tuple(prefixes),
    )


def pack(
    documents: Sequence[Document],
    capacity: int,
    pad_id: int,
    ids: Sequence[int],
    prefixes: Sequence[int] = (),
) -> Batch:
    """Documents side by side, then padding up to `capacity` tokens, which has no loss and zeros in its streams."""
    padding = capacity - sum(len(document.tokens_T) for document in documents)
    lengths = [len(document.tokens_T) for document in documents]
    tokens = [document.tokens_T for document in documents]
    targets = [document.targets_T for document in documents]
    streams = _side_by_side([document.extra for document in documents])
    if padding:
        lengths.append(padding)
        tokens.append(torch.full((padding,), pad_id))
        targets.append(torch.full((padding,), IGNORED))
        for name, stream in streams.items():
            zeros = stream.new_zeros((padding, *stream.shape[1:]))
            streams[name] = torch.cat([stream, zeros])
        prefixes = [*prefixes, NONE] if prefixes else ()
    return make_batch(torch.cat(tokens), torch.cat(targets), lengths, ids, streams, prefixes)


def join(batches: Sequence[Batch]) -> Batch:
    """Batches side by side as one; their documents stay apart."""
    if len(batches) == 1:
        return batches[0]
    if any(batch.prefixes for batch in batches):
        raise ValueError("batches whose documents have prefixes are not joined")
    lengths = [length for batch in batches for length in batch.lengths]
    return Batch(
        tokens_T=torch.cat([batch.tokens_T for batch in batches]),
        targets_T=torch.cat([batch.targets_T for batch in batches]),
        positions_T=torch.cat([batch.positions_T for batch in batches]),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        lengths=lengths,
        ids=[id for batch in batches for id in batch.ids],
        extra=_side_by_side([batch.extra for batch in batches]),
    )


def _side_by_side(streams: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The same streams of several parts; a stream that only some parts have is a mistake of who made them."""
    names = list(streams[0])
    if any(set(part) != set(names) for part in streams):
        have = " and ".join(str(sorted(part)) for part in streams)
        raise ValueError(f"parts of one batch have different streams: {have}")
    return {name: torch.cat([part[name] for part in streams]) for name in names}
