"""Pretraining samples: the documents one after the other, cut into windows of equal length.

    stream    doc 0 ........ doc 1 .. doc 2 .................. doc 3 ....
    windows   |------ 0 ------|------ 1 ------|------ 2 ------|------ 3 --> wraps round to doc 0

Every token is in a window: the last one wraps round to the beginning, so nothing is left out and fewer tokens
than one window are seen twice in an epoch. Documents stay apart: positions restart, attention does not reach
across (`cu_seqlens`), and the last token of a document predicts nothing. The part of a document that a
window cuts off goes on in the next window as if it began there. Windows come in shuffled order.

With a `span` only a part of the windows is used: one source trains on the first ones, another measures on the last.
"""

from typing import TYPE_CHECKING

import numpy as np

from cairn.core.errors import ConfigError, DataError
from cairn.train.data.shuffle import shuffled
from cairn.train.data.source import cut
from cairn.train.data.tokens import Tokens, count

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

IGNORED = -100  # as in `batch`, which this module loads with the first sample only


def _bounds(span: tuple[float, float], total: int, length: int) -> tuple[int, int]:
    """The first window of a part and the one behind its last. Parts meet where both have a whole window."""
    windows, whole = -(-total // length), total // length
    last_cut = max(whole - 1, 1)  # what lies behind the last whole window goes round
    first, stop = (cut(part, windows) for part in span)
    first = min(first, last_cut)
    stop = stop if span[1] == 1.0 else min(stop, last_cut)
    if first and stop == windows:
        stop = whole
    return first, stop


class Windows:
    """A Source of fixed windows over a token stream."""

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        seed: int = 0,
        *,
        shuffle: bool = True,
        boundaries: bool = True,
        span: tuple[float, float] = (0.0, 1.0),
        name: str = "",
    ) -> None:
        """`span` is the part of the windows to use, such as (0, 0.99) to train and (0.99, 1) to validate.

        A part that does not begin at 0 leaves the last window out if that goes round to the beginning: those tokens
        belong to another part. `name` is what messages call these tokens, by default the path of their store.
        """
        total, name = count(tokens), name or str(tokens.path)
        if sequence_length < 1:
            raise ConfigError(f"a sequence of {sequence_length} tokens is not possible")
        if total < sequence_length:
            raise DataError(
                f"{name} has {total:,} tokens, less than one sequence of {sequence_length}",
                hint=f"use more text, or --data.sequence {max(1, total)} or less",
            )
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.boundaries = boundaries
        self._shuffle, self._seed = shuffle, seed
        self._first, stop = _bounds(span, total, sequence_length)
        if not self._first < stop:
            raise ConfigError(
                f"{name} has {total:,} tokens, which leave no sequence of {sequence_length} for the part {span}",
                hint=f"use more text, --data.sequence {max(1, total // 2)} or less, "
                "or --validation.share 0 to hold nothing out",
            )
        self.samples_per_epoch = stop - self._first

    @property
    def fingerprint(self) -> str:
        order = f"seed {self._seed}" if self._shuffle else "in order"
        part = f"{self._first}+{self.samples_per_epoch} windows of {self.sequence_length}"
        return f"{self.tokens.identity}, {part}, boundaries {self.boundaries}, {order}"

    def batch(self, number: int) -> "Batch":
        import torch

        from cairn.train.data.batch import make_batch

        item = self._item(number)
        tokens_T, targets_T, lengths = self._window((self._first + item) * self.sequence_length)
        return make_batch(
            torch.from_numpy(tokens_T), torch.from_numpy(targets_T), lengths, [number]
        )

    def _item(self, number: int) -> int:
        if not self._shuffle:
            return number % self.samples_per_epoch
        return shuffled(number, self.samples_per_epoch, self._seed)[1]

    def _window(self, start: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Tokens, targets and document lengths of the window that begins at `start`."""
        total = count(self.tokens)
        parts = [self._stretch(start, min(start + self.sequence_length, total))]
        over = start + self.sequence_length - total
        if over > 0:
            parts.append(self._stretch(0, over))
        tokens_T, targets_T = (np.concatenate([part[at] for part in parts]) for at in (0, 1))
        if not self.boundaries:
            return tokens_T, targets_T, [self.sequence_length]
        return tokens_T, targets_T, [length for part in parts for length in part[2]]

    def _stretch(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, list[int]]:
        """Tokens start..stop-1 with what each predicts."""
        offsets = self.tokens.offsets
        with_next = self.tokens.read(start, min(stop + 1, int(offsets[-1])))
        tokens, targets = with_next[: stop - start], np.full(stop - start, IGNORED)
        learnt = len(with_next) - 1  # the very last token of the stream has no next one
        targets[:learnt] = with_next[1:]
        if self.tokens.has_mask:
            targets[:learnt][~self.tokens.mask(start + 1, start + 1 + learnt)] = IGNORED
        first, last = np.searchsorted(offsets, [start, stop], side="right")
        cuts = np.unique(offsets[first:last])  # where documents end, in (start, stop]
        if self.boundaries:
            targets[cuts - 1 - start] = IGNORED
        edges = np.unique([start, *cuts, stop])
        return tokens, targets, np.diff(edges).tolist()
