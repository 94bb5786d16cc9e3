"""Documents in memory with the interface of those on disk, for tests."""

from pathlib import Path

import numpy as np


class InMemory:
    path = Path("memory")
    format = "memory"
    tokenizer: str | None = None
    identity = "memory"

    def __init__(self, documents, masks=None) -> None:
        self.documents = documents
        self.has_mask = masks is not None
        self.offsets = np.cumsum([0, *map(len, documents)]).astype(np.int64)
        self._ids = np.array([id for document in documents for id in document], np.int64)
        flat = [bit for mask in masks for bit in mask] if masks else [1] * len(self._ids)
        self._mask = np.array(flat, bool)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._ids[start:stop].copy()

    def mask(self, start: int, stop: int) -> np.ndarray:
        return self._mask[start:stop].copy()
