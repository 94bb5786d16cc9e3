"""Documents as tokens on disk, whatever the format: the one interface that sampling and packing read.

    tokens      [ doc 0 ........ | doc 1 .. | doc 2 ............ ]
    offsets       0                17         24                 41       documents + 1 of them

Knows no file format: those are `store`, `megatron` and `llmc`; `open_tokens` chooses among them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from cairn.core.errors import DataError


class Tokens(Protocol):
    @property
    def path(self) -> Path:
        """Path for messages."""
        ...

    @property
    def format(self) -> str:
        """Name of the format: "token store", "Megatron", "llm.c"."""
        ...

    @property
    def tokenizer(self) -> str | None:
        """The hash of the tokenizer that made it; None where the format does not say."""
        ...

    @property
    def identity(self) -> str:
        """Identity of the data independent of its path: its size, and its checksum if known."""
        ...

    @property
    def has_mask(self) -> bool:
        """Return whether there is a loss mask; otherwise all tokens have a loss."""
        ...

    @property
    def offsets(self) -> np.ndarray:
        """Start of each document and end of the last: int64, non-decreasing."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 as int64."""
        ...

    def mask(self, start: int, stop: int) -> np.ndarray:
        """Loss mask of these tokens, as bool."""
        ...


def count(tokens: Tokens) -> int:
    return int(tokens.offsets[-1])


def documents(tokens: Tokens) -> int:
    return len(tokens.offsets) - 1


def document(tokens: Tokens, number: int) -> np.ndarray:
    """The tokens of one document."""
    if not 0 <= number < documents(tokens):
        raise DataError(
            f"{tokens.path} has no document {number}; it has {documents(tokens)}",
            hint="documents count from 0",
        )
    return tokens.read(int(tokens.offsets[number]), int(tokens.offsets[number + 1]))


class Joined:
    """Several of them one after the other, such as the shards of a corpus."""

    def __init__(self, parts: Sequence[Tokens], path: Path) -> None:
        self.parts = list(parts)
        self.path = path
        self.format = f"{len(parts)} x {parts[0].format}"
        self.has_mask = any(part.has_mask for part in parts)
        hashes = {part.tokenizer for part in parts}
        if len(hashes) > 1:
            raise DataError(
                f"the parts of {path} were made with different tokenizers: {sorted(map(str, hashes))}",
                hint="tokenize all of them with one tokenizer",
            )
        self.tokenizer = hashes.pop()
        self.identity = " + ".join(part.identity for part in parts)
        self._starts = np.cumsum([0, *(count(part) for part in parts)])
        inner = [part.offsets[:-1] + at for part, at in zip(parts, self._starts[:-1], strict=True)]
        self.offsets = np.concatenate([*inner, self._starts[-1:]]).astype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        pieces = [part.read(low, high) for part, low, high in self._within(start, stop)]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def mask(self, start: int, stop: int) -> np.ndarray:
        pieces = [part.mask(low, high) for part, low, high in self._within(start, stop)]
        return np.concatenate(pieces) if pieces else np.empty(0, bool)

    def _within(self, start: int, stop: int) -> list[tuple[Tokens, int, int]]:
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, stop, side="left"))
        return [
            (self.parts[at], max(start - low, 0), min(stop, int(self._starts[at + 1])) - low)
            for at in range(first, min(last, len(self.parts)))
            for low in (int(self._starts[at]),)
        ]


def checked_range(start: int, stop: int, tokens: int, path: Path) -> None:
    """A read outside the file is a bug or a damaged index; it must not give other tokens."""
    if not 0 <= start <= stop <= tokens:
        raise DataError(f"{path} has {tokens} tokens; {start} to {stop} is not within them")
