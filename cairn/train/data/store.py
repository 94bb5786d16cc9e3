"""The token store: a folder with documents as token ids, read through memory maps.

    STORE/tokens.bin   every token of every document, one after the other: uint16 where ids fit, else uint32
    STORE/learn.bin    only for chats: one byte per token, 1 where the assistant speaks
    STORE/docs.idx     where documents begin, and what the store is:
                           8 bytes   CAIRNIDX
                           8 bytes   length of the header, u64
                           header    JSON, spaces at its end up to a multiple of 8 (see Header)
                           offsets   u64 [documents + 1], in tokens; the last one is the number of tokens
    STORE/tokenizer/   the tokenizer that made it, so that the store can be read back as text

All numbers are little-endian. The folder is renamed into place when it is complete, so a store that is there is
whole; sizes and the index are checked on every opening, the tokens themselves by `verify`.
"""

import zlib
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from cairn.core.errors import DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.tokens import checked_range

MAGIC = b"CAIRNIDX"
VERSION = 1
INDEX, TOKENS, LEARN, TOKENIZER = "docs.idx", "tokens.bin", "learn.bin", "tokenizer"
CHUNK = 1 << 24  # bytes that are read at once by a check


class Header(msgspec.Struct, frozen=True):
    """Header of docs.idx."""

    version: int
    dtype: str  # uint16 or uint32
    documents: int
    tokens: int
    vocab_size: int  # ids are below it
    tokenizer: str  # hash, see tokenizer_identity
    made_with: str  # the name of the tokenizer, for a person
    learn: bool  # whether learn.bin is there
    offsets_crc32: int
    tokens_crc32: int
    learn_crc32: int = 0
    text_bytes: int = 0  # how much text it was
    sources: list[str] = []  # names of the files it came from


class Store:
    """A store that is open for reading. Safe to share between threads; pickles as its path."""

    format = "token store"

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.header, self.offsets = _read_index(self.path)
        self.tokenizer: str | None = self.header.tokenizer
        self.has_mask = self.header.learn
        self.identity = f"{self.header.tokens} tokens {self.header.tokens_crc32:08x}"
        size = self.header.tokens
        self._tokens = _map(self.path / TOKENS, np.dtype(self.header.dtype).newbyteorder("<"), size)
        self._learn = (
            _map(self.path / LEARN, np.dtype(np.uint8), size) if self.header.learn else None
        )

    def __reduce__(self) -> tuple[type, tuple[Path]]:
        return type(self), (self.path,)

    def read(self, start: int, stop: int) -> np.ndarray:
        checked_range(start, stop, self.header.tokens, self.path)
        return self._tokens[start:stop].astype(np.int64)

    def mask(self, start: int, stop: int) -> np.ndarray:
        checked_range(start, stop, self.header.tokens, self.path)
        if self._learn is None:
            return np.ones(stop - start, bool)
        return self._learn[start:stop].astype(bool)

    def own_tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store."""
        from cairn.models.tokenizer_folder import tokenizer_from_folder

        return tokenizer_from_folder(self.path / TOKENIZER)

    def verify(self, advance: Callable[[int], None] = lambda count: None) -> None:
        """Read every token: refuses a store in which a single bit has changed. Tells bytes read."""
        self._check_sum(TOKENS, self.header.tokens_crc32, advance)
        if self.header.learn:
            self._check_sum(LEARN, self.header.learn_crc32, advance)

    def _check_sum(self, name: str, expected: int, advance: Callable[[int], None]) -> None:
        checksum = 0
        with (self.path / name).open("rb") as file:
            while chunk := file.read(CHUNK):
                checksum = zlib.crc32(chunk, checksum)
                advance(len(chunk))
        if checksum != expected:
            raise DataError(
                f"{self.path / name} is damaged: its checksum is {checksum:08x}, not {expected:08x}",
                hint="copy it again, or tokenize the text again",
            )


def is_store(path: Path) -> bool:
    return (path / INDEX).is_file()


def _read_index(folder: Path) -> tuple[Header, np.ndarray]:
    path = folder / INDEX
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(
            f"{folder} is not a token store: {INDEX} cannot be read ({error.strerror})",
            hint="make one: cairn data tokenize FILES --tokenizer FOLDER --out STORE",
        ) from None
    header, body = _split(path, content)
    if len(body) != 8 * (header.documents + 1):
        raise _damaged(path, f"{len(body)} bytes of offsets, {8 * (header.documents + 1)} expected")
    if zlib.crc32(body) != header.offsets_crc32:
        raise _damaged(path, "the checksum of the offsets is wrong")
    offsets = np.frombuffer(body, "<u8").astype(np.int64)
    if offsets[0] != 0 or offsets[-1] != header.tokens or (np.diff(offsets) < 0).any():
        raise _damaged(path, f"the offsets do not go from 0 to {header.tokens}")
    return header, offsets


def _split(path: Path, content: bytes) -> tuple[Header, bytes]:
    """Header and the rest of an index."""
    if content[: len(MAGIC)] != MAGIC:
        raise _damaged(path, f"it begins with {content[:8]!r}, not {MAGIC!r}")
    end = 16 + int.from_bytes(content[8:16], "little")
    if end > len(content):
        raise _damaged(path, f"it ends at byte {len(content)}, within a header of {end} bytes")
    try:
        header = msgspec.json.decode(content[16:end], type=Header)
    except msgspec.DecodeError as error:
        raise _damaged(path, f"the header cannot be read: {error}") from None
    if header.version != VERSION:
        raise DataError(
            f"{path} has version {header.version}; this Cairn reads version {VERSION}",
            hint="use the Cairn that wrote it, or tokenize the text again",
        )
    if header.dtype not in ("uint16", "uint32"):
        raise _damaged(path, f"tokens of type {header.dtype!r}")
    return header, content[end:]


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path} is damaged: {why}", hint="copy it again, or tokenize the text again")


def _map(path: Path, dtype: np.dtype, tokens: int) -> np.ndarray:
    expected = tokens * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected:
            what = "truncated" if size < expected else "too long"
            raise DataError(
                f"{path} is {what}: {size} bytes, and {tokens} tokens take {expected}",
                hint="copy it again, or tokenize the text again",
            )
        return np.memmap(path, dtype, mode="r") if tokens else np.empty(0, dtype)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
