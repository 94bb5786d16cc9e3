"""Writes a token store so that it is either whole or not there.

    STORE.unfinished-PID/   tokens.bin grows, offsets are kept        a crash leaves this, never a half store
          --rename-->  STORE/

A full disk, a token out of range or any other error removes what was begun. Knows nothing about text.
"""

import contextlib
import errno
import os
import shutil
import zlib
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import msgspec
import numpy as np

from cairn.core.errors import ConfigError, DataError
from cairn.core.units import format_bytes
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.store import INDEX, LEARN, MAGIC, TOKENIZER, TOKENS, VERSION, Header
from cairn.train.data.tokenizer_identity import id_limit, tokenizer_hash
from cairn.train.data.tokenizer_trainer import write_tokenizer_files


class StoreWriter:
    """`with StoreWriter(path, tokenizer) as writer: writer.add(ids)`; the store appears at the end of the block."""

    def __init__(
        self, path: Path, tokenizer: Tokenizer, *, learn: bool = False, replace: bool = False
    ) -> None:
        check_free(path, replace)
        self.path = path
        self.learn = learn
        self._replace = replace
        self._tokenizer = tokenizer
        self._limit = id_limit(tokenizer)
        self.dtype = np.dtype("<u2" if self._limit <= 1 << 16 else "<u4")
        self._ends = array("Q", [0])
        self._unended = 0  # tokens behind the last end
        self._crc = {TOKENS: 0, LEARN: 0}
        self._files: dict[str, BinaryIO] = {}
        self._folder = path.with_name(f"{path.name}.unfinished-{os.getpid()}")
        self.text_bytes = 0
        self.sources: list[str] = []

    @property
    def tokens(self) -> int:
        return self._ends[-1]

    @property
    def documents(self) -> int:
        return len(self._ends) - 1

    def lengths(self) -> np.ndarray:
        """Tokens of each document so far."""
        return np.diff(np.asarray(self._ends, np.int64))

    def __enter__(self) -> "StoreWriter":
        # Of a process with this number that was killed; in a container every one has the same.
        shutil.rmtree(self._folder, ignore_errors=True)
        try:
            self._folder.mkdir(parents=True)
            (self._folder / TOKENIZER).mkdir()
            write_tokenizer_files(self._tokenizer, self._folder / TOKENIZER)
            for name in (TOKENS, LEARN) if self.learn else (TOKENS,):
                self._files[name] = (self._folder / name).open("wb", buffering=1 << 20)
        except OSError as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise _cannot_write(self.path, error) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
            elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(self.path, self.tokens) from None
        except OSError as failed:
            if failed.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _full(self.path, self.tokens) from None
            raise _cannot_write(self.path, failed) from None
        finally:
            self._abandon()

    def add(self, ids: Sequence[int] | np.ndarray, learn: np.ndarray | None = None) -> None:
        """Add a document, with a loss mask if the store contains chats."""
        self.add_many(np.asarray(ids, np.int64), [len(ids)], learn)

    def add_many(
        self, ids: np.ndarray, lengths: Sequence[int], learn: np.ndarray | None = None
    ) -> None:
        """Tokens that end documents of these lengths; what is left over begins a document that goes on next time."""
        if (learn is not None) != self.learn or (learn is not None and len(learn) != len(ids)):
            raise ValueError("a mask belongs to the tokens of chats, and to no others")
        left = self._unended + len(ids) - sum(lengths)
        if left < 0:
            raise ValueError(f"documents of {lengths} tokens are longer than what was written")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._limit:
            raise DataError(
                f"token id {int(ids.max())} is not below {self._limit}, the end of the vocabulary"
            )
        self._write(TOKENS, ids.astype(self.dtype).tobytes())
        if learn is not None:
            self._write(LEARN, learn.astype(np.uint8).tobytes())
        for length in lengths:
            self._ends.append(self._ends[-1] + length)
        self._unended = left

    def _write(self, name: str, content: bytes) -> None:
        self._files[name].write(content)
        self._crc[name] = zlib.crc32(content, self._crc[name])

    def _finish(self) -> None:
        if self._unended:
            raise ValueError(f"the last document, of {self._unended} tokens so far, was not ended")
        if not self.tokens:
            raise DataError(
                f"there is nothing to write to {self.path}: no document has a token",
                hint="check that the files hold text",
            )
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        self._write_index()
        _put_in_place(self._folder, self.path, self._replace)

    def _write_index(self) -> None:
        body = np.asarray(self._ends, "<u8").tobytes()
        header = Header(
            version=VERSION,
            dtype="uint16" if self.dtype.itemsize == 2 else "uint32",
            documents=self.documents,
            tokens=self.tokens,
            vocab_size=self._limit,
            tokenizer=tokenizer_hash(self._tokenizer),
            made_with=Path(self._tokenizer.source).name,
            learn=self.learn,
            offsets_crc32=zlib.crc32(body),
            tokens_crc32=self._crc[TOKENS],
            learn_crc32=self._crc[LEARN],
            text_bytes=self.text_bytes,
            sources=self.sources,
        )
        text = msgspec.json.encode(header)
        text += b" " * (-len(text) % 8)
        with (self._folder / INDEX).open("wb") as file:
            file.write(MAGIC + len(text).to_bytes(8, "little") + text + body)
            file.flush()
            os.fsync(file.fileno())

    def _abandon(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # its buffer does not fit on a full disk either
                file.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def check_free(path: Path, replace: bool) -> None:
    """Refuse a name that is taken, before any work."""
    if not path.exists():
        return
    if not replace:
        raise ConfigError(f"{path} exists", hint="choose another name, or pass --replace")
    if not (path / INDEX).is_file():
        raise ConfigError(
            f"{path} exists and is not a token store",
            hint="remove it yourself, or choose another name",
        )


def _put_in_place(fresh: Path, path: Path, replace: bool) -> None:
    """Rename into place; a replaced store stays until the new one is ready."""
    check_free(path, replace)
    old = path.with_name(f"{path.name}.replaced-{os.getpid()}")
    if path.exists():
        path.rename(old)
    fresh.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _full(path: Path, tokens: int) -> DataError:
    free = format_bytes(shutil.disk_usage(_existing(path)).free)
    return DataError(
        f"the disk is full: {path} could not be written beyond {tokens} tokens ({free} free)",
        hint="make room, or write to another disk with --out; what was begun has been removed",
    )


def _cannot_write(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} cannot be written: {error.strerror}", hint="choose another --out")


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.absolute().parents) if parent.exists())
