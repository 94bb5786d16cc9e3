"""Fine-tuning samples: whole documents, packed side by side by a best-fit plan, padded to full length.

    sample    chat 17 .......... | chat 4 ..... | chat 230 .... | padding
    targets   only what the store marks as to be learnt, such as the assistant's words; none for padding

The plan is made once for a store and kept in it. Bins come in shuffled order. With a `span` only a part of them is
used, as of `Windows`.
"""

from typing import TYPE_CHECKING

import numpy as np

from cairn.core.errors import ConfigError, DataError
from cairn.train.data.packing import Piece, TooLong, cached_plan
from cairn.train.data.shuffle import shuffled
from cairn.train.data.source import cut
from cairn.train.data.store import Store
from cairn.train.data.tokens import Tokens
from cairn.train.data.windows import IGNORED

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch, Document


class PackedDocuments:
    """A Source of packed documents."""

    def __init__(
        self,
        tokens: Tokens,
        sequence_length: int,
        seed: int = 0,
        *,
        pad_id: int = 0,
        shuffle: bool = True,
        too_long: TooLong = "refuse",
        span: tuple[float, float] = (0.0, 1.0),
    ) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self._seed, self._shuffle, self._pad = seed, shuffle, pad_id
        self._too_long = too_long
        folder = tokens.path if isinstance(tokens, Store) else None
        self.plan = cached_plan(np.diff(tokens.offsets), sequence_length, too_long, folder)
        if not self.plan.bins:
            raise DataError(f"{tokens.path} has no tokens", hint="check what it was made from")
        self._first, stop = (cut(part, self.plan.bins) for part in span)
        if not self._first < stop:
            raise ConfigError(
                f"{tokens.path} fills {self.plan.bins} sequences of {sequence_length} tokens, "
                f"which leave none for the part {span}",
                hint="use more chats, a smaller --data.sequence, or --validation.share 0 to hold nothing out",
            )
        self.samples_per_epoch = stop - self._first

    @property
    def fingerprint(self) -> str:
        order = f"seed {self._seed}" if self._shuffle else "in order"
        part = f"{self._first}+{self.samples_per_epoch} of " if self.is_part else ""
        packed = f"{part}{self.plan.bins} bins of {self.sequence_length}, {self._too_long}"
        return f"{self.tokens.identity}, {packed}, {order}"

    @property
    def is_part(self) -> bool:
        return self.samples_per_epoch < self.plan.bins

    def batch(self, number: int) -> "Batch":
        from cairn.train.data.batch import pack

        bins = self.samples_per_epoch
        item = shuffled(number, bins, self._seed)[1] if self._shuffle else number % bins
        documents = [self._document(piece) for piece in self.plan.pieces(self._first + item)]
        return pack(documents, self.sequence_length, self._pad, [number])

    def _document(self, piece: Piece) -> "Document":
        """Tokens of a piece with what each predicts; the last token of a document predicts nothing."""
        import torch

        from cairn.train.data.batch import Document

        low, high = self.tokens.offsets[piece.document : piece.document + 2].tolist()
        start = low + piece.start
        with_next = self.tokens.read(start, min(start + piece.length + 1, high))
        learn = self.tokens.mask(start, start + len(with_next))
        targets = np.full(piece.length, IGNORED)
        targets[: len(with_next) - 1] = np.where(learn[1:], with_next[1:], IGNORED)
        tokens = np.asarray(with_next[: piece.length], np.int64)
        return Document(torch.from_numpy(tokens), torch.from_numpy(targets))
