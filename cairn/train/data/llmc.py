"""Reads the token files of llm.c and modded-nanogpt: one .bin with a header and tokens.

    256 x int32    magic, version, number of tokens, zeros
    tokens         uint16 (magic 20240520, version 1: GPT-2) or uint32 (magic 20240801, version 7: Llama 3)

Documents begin with the tokenizer's begin-of-text token, which is how they are told apart here.
"""

from pathlib import Path

import numpy as np

from cairn.core.errors import DataError
from cairn.train.data.tokens import checked_range

HEADER_BYTES = 256 * 4
_KINDS = {(20240520, 1): ("<u2", 50256), (20240801, 7): ("<u4", 128000)}  # dtype, begin of text


class LlmC:
    format = "llm.c"
    tokenizer: str | None = None
    has_mask = False

    def __init__(self, path: Path | str, begin_of_text: int | None = None) -> None:
        self.path = Path(path)
        magic, version, tokens = _header(self.path)
        if (magic, version) not in _KINDS:
            raise DataError(
                f"{self.path} has magic {magic} and version {version}, which are not llm.c's",
                hint="known are " + ", ".join(f"{m} version {v}" for m, v in _KINDS),
            )
        name, usual = _KINDS[magic, version]
        dtype = np.dtype(name)
        expected = HEADER_BYTES + tokens * dtype.itemsize
        size = self.path.stat().st_size
        if size != expected or tokens < 1:
            raise DataError(
                f"{self.path} has {size} bytes, and its header speaks of {tokens} tokens in {expected}",
                hint="copy it again",
            )
        self._begin = usual if begin_of_text is None else begin_of_text
        self._tokens = np.memmap(self.path, dtype, mode="r", offset=HEADER_BYTES, shape=(tokens,))
        self.offsets = _documents(self._tokens, self._begin)
        self.identity = f"{tokens} llm.c tokens in {len(self.offsets) - 1} documents"

    def __reduce__(self) -> tuple[type, tuple[Path, int]]:
        return type(self), (self.path, self._begin)

    def read(self, start: int, stop: int) -> np.ndarray:
        checked_range(start, stop, len(self._tokens), self.path)
        return self._tokens[start:stop].astype(np.int64)

    def mask(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, bool)


def is_llmc(path: Path) -> bool:
    if not path.is_file() or path.suffix != ".bin":
        return False
    return any(_header(path)[0] == magic for magic, _ in _KINDS)


def _header(path: Path) -> tuple[int, int, int]:
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    if len(content) < HEADER_BYTES:
        return 0, 0, 0
    magic, version, tokens = np.frombuffer(content, "<i4", 3).tolist()
    return magic, version, tokens


def _documents(tokens: np.ndarray, begin: int, step: int = 1 << 24) -> np.ndarray:
    """Start offsets of the documents, found in parts of the file."""
    starts_by_file = [
        np.nonzero(tokens[at : at + step] == begin)[0] + at for at in range(0, len(tokens), step)
    ]
    starts = np.concatenate(starts_by_file).astype(np.int64)
    if not len(starts) or starts[0] != 0:
        starts = np.concatenate([[0], starts])
    return np.concatenate([starts, [len(tokens)]]).astype(np.int64)
