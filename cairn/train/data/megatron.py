"""Reads the datasets of Megatron-LM: NAME.bin with tokens, NAME.idx with where they are.

    NAME.idx    9 bytes "MMIDIDX\\0\\0"; version u64 = 1; dtype code u8; sequences u64; document ends u64;
                int32 lengths [sequences]; int64 byte pointers [sequences]; int64 first sequence [document ends]

A document is a run of sequences. The format does not name its tokenizer, so it cannot be checked.
"""

import struct
import zlib
from pathlib import Path

import numpy as np

from cairn.core.errors import DataError
from cairn.train.data.tokens import checked_range

MAGIC = b"MMIDIDX\x00\x00"
_HEAD = struct.Struct("<QBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats


class Megatron:
    format = "Megatron"
    tokenizer: str | None = None
    has_mask = False

    def __init__(self, path: Path | str) -> None:
        """`path` is NAME, NAME.bin or NAME.idx."""
        self.path = _stem(Path(path))
        index = self.path.with_name(self.path.name + ".idx")
        content = _content(index)
        dtype, lengths, pointers, ends = _read_index(index, content)
        _check_contiguous(index, lengths, pointers, dtype.itemsize)
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        if len(ends) < 2 or ends[0] != 0 or ends[-1] != len(lengths) or (np.diff(ends) < 0).any():
            raise _damaged(index, f"its documents do not cover its {len(lengths)} sequences")
        self.offsets = starts[ends]
        self.identity = f"{self.offsets[-1]} Megatron tokens {zlib.crc32(content):08x}"
        self._tokens = _map(
            self.path.with_name(self.path.name + ".bin"), dtype, int(self.offsets[-1])
        )

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path,)

    def read(self, start: int, stop: int) -> np.ndarray:
        checked_range(start, stop, int(self.offsets[-1]), self.path)
        return self._tokens[start:stop].astype(np.int64)

    def mask(self, start: int, stop: int) -> np.ndarray:
        return np.ones(stop - start, bool)


def is_megatron(path: Path) -> bool:
    stem = _stem(path)
    if not stem.name:  # "." or "/", which has no neighbours
        return False
    return all(stem.with_name(stem.name + suffix).is_file() for suffix in (".bin", ".idx"))


def _stem(path: Path) -> Path:
    return path.with_name(path.name[:-4]) if path.suffix in (".bin", ".idx") else path


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", hint="Megatron needs NAME.bin and NAME.idx"
        ) from None


def _read_index(path: Path, content: bytes) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    head = len(MAGIC) + _HEAD.size
    if content[: len(MAGIC)] != MAGIC or len(content) < head:
        raise _damaged(path, f"it begins with {content[:9]!r}, not {MAGIC!r}")
    version, code, sequences, documents = _HEAD.unpack(content[len(MAGIC) : head])
    if version != 1 or code not in _DTYPES:
        raise DataError(
            f"{path} has version {version} and type code {code}, which are not known",
            hint=f"version 1 and one of the codes {sorted(_DTYPES)} can be read",
        )
    expected = head + 12 * sequences + 8 * documents
    if len(content) not in (expected, expected + sequences):  # the latter: one mode per sequence
        raise _damaged(path, f"{len(content)} bytes, {expected} expected")
    lengths = np.frombuffer(content, "<i4", sequences, head)
    pointers = np.frombuffer(content, "<i8", sequences, head + 4 * sequences)
    ends = np.frombuffer(content, "<i8", documents, head + 12 * sequences)
    return np.dtype(_DTYPES[code]), lengths, pointers, ends


def _check_contiguous(path: Path, lengths: np.ndarray, pointers: np.ndarray, itemsize: int) -> None:
    if (lengths < 0).any():
        raise _damaged(path, "a sequence has a negative length")
    expected = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * itemsize
    if len(lengths) and not np.array_equal(pointers, expected):
        at = int(np.nonzero(pointers != expected)[0][0])
        raise DataError(
            f"sequence {at} of {path} is at byte {int(pointers[at])}, not {int(expected[at])}: "
            "its sequences do not stand one after the other",
            hint="write the dataset again with Megatron's preprocess_data or merge_datasets",
        )


def _map(path: Path, dtype: np.dtype, tokens: int) -> np.ndarray:
    expected = tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size < expected or not tokens:
            why = f"{size} bytes, and the index speaks of {tokens} tokens in {expected}"
            raise DataError(f"{path} is truncated or empty: {why}", hint="copy it again")
        return np.memmap(path, dtype, mode="r", shape=(tokens,))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}", hint="copy it again")
