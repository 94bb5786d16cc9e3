"""Do ranks that hold the same state really hold the same? One number of 64 bits from each, compared.

    rank 0   pieces abc   sum 91        rank 1   pieces abc   sum 91
    rank 2   pieces abc   sum 93  <-- one of three disagrees: it is named
    rank 3   pieces xyz   sum 17        no other rank has these pieces: nothing to compare

Every flipped bit changes the sum of the words modulo 2**64, and sums are combined with an odd factor, which keeps every
change. With two replicas one knows that something is wrong, not who; then both go back. Only the sum costs anything:
one reading of the state.
"""

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.core.errors import CairnError
from cairn.train.checkpoint.memory_checksums import word_sum
from cairn.train.checkpoint.piece import Piece


class Corrupted(CairnError):
    """Ranks that must hold the same numbers do not."""

    exit_status = 4

    def __init__(
        self,
        message: str,
        hint: str | None = None,
        ranks: tuple[int, ...] = (),
        certain: bool = False,
    ) -> None:
        """`ranks`: whose numbers differ; `certain`: it is known that it is they who are wrong."""
        super().__init__(message, hint or "the run goes back to the last state on which all agreed")
        self.ranks, self.certain = ranks, certain

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.ranks, self.certain)


class Mark(NamedTuple):
    kind: int  # which pieces, as a number
    check: int  # of their bytes: 64 bits, as a signed number, which is what torch can gather


def mark_of(pieces: Mapping[str, Piece]) -> Mark:
    """Checksum of weights and optimizer states; the random state differs between ranks."""
    kind, check = 0, 0
    for name in sorted(pieces):
        piece = pieces[name]
        if name.startswith("random/") or not piece.tensor.numel():
            continue
        about = f"{name} {piece.shape} {piece.offsets} {tuple(piece.tensor.shape)}"
        kind = zlib.crc32(about.encode(), kind)
        check = (check * 31 + tensor_sum(piece.tensor.detach())) % 2**64
    return Mark(kind, (check + 2**63) % 2**64 - 2**63)


def tensor_sum(tensor: Tensor) -> int:
    """Sum of 64-bit words, computed on the tensor's device, because the bus is slower than GPU memory."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if not flat.is_cuda:
        numbers: Any = flat.numpy()
        return word_sum(memoryview(numbers))
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    return int(words.sum().item()) + int(flat[words.numel() * 8 :].long().sum().item())


def disagreeing(marks: Sequence[Mark]) -> tuple[list[int], bool]:
    """Ranks whose numbers differ from those of their replicas, and whether it is known that it is they."""
    wrong: list[int] = []
    certain = True
    for kind in dict.fromkeys(mark.kind for mark in marks):
        ranks = [rank for rank, mark in enumerate(marks) if mark.kind == kind]
        counts = Counter(marks[rank].check for rank in ranks)
        if len(counts) == 1:
            continue
        check, votes = counts.most_common(1)[0]
        if votes > len(ranks) / 2:
            wrong += [rank for rank in ranks if marks[rank].check != check]
        else:
            wrong += ranks
            certain = False
    return sorted(wrong), certain


def complaint(marks: Sequence[Mark], step: int) -> Corrupted | None:
    wrong, certain = disagreeing(marks)
    if not wrong:
        return None
    who = f"rank {wrong[0]}" if len(wrong) == 1 else f"ranks {', '.join(map(str, wrong))}"
    if certain:
        verb = "holds" if len(wrong) == 1 else "hold"
        return Corrupted(
            f"{who} {verb} other numbers than the replicas after step {step}",
            ranks=tuple(wrong),
            certain=True,
        )
    return Corrupted(
        f"{who} should hold the same numbers after step {step} and do not; which one is right is unknown",
        ranks=tuple(wrong),
    )
