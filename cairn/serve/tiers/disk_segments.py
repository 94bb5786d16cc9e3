"""Pages on a disk: a folder of segment files, each a row of equal slots that know what they hold.

    DIR/<model>/segment-00003    [ header | page ] [ header | page ] ...     a slot begins at a multiple of 4096 bytes
    header                       magic, model, key, parent, seconds to compute it again, checksum of the page

Nothing is believed: a slot is read only if its header names this model and the key that is asked for, and the checksum
fits. So a truncated file, a half-written slot and a segment of another model are found, and their pages computed. What
a server has stored is found by the next one with the same model, weights and layout of pages. One server at a time
holds a folder. Knows no policy: which slot holds which page is for `slot_table`.
"""

import fcntl
import hashlib
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.hw.ceilings import Measured
from cairn.hw.measure_host import disk_rates

BLOCK = 4096
MAGIC = b"cairn kv 1"
SEGMENT_BYTES = 256 << 20
TRIED_BYTES = 16 << 20  # to measure a disk of which nothing is known


class Damaged(Exception):
    """A slot does not hold what was asked for."""


class Unreachable(Exception):
    """The store does not respond, so the content of a slot is unknown."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    model: str
    key: bytes
    parent: bytes
    seconds: float
    checksum: int


class Filled(NamedTuple):
    slot: int
    header: Header


_decode = msgspec.msgpack.Decoder(Header).decode


class DiskSegments:
    latency_s = 0.002  # from the wish for a page until its first byte

    def __init__(self, folder: Path, capacity: int, page_bytes: int, model: str) -> None:
        """`model`: what the pages belong to, as `fingerprint` has it."""
        self.model, self.page_bytes = model, page_bytes
        self._stride = BLOCK + -(-page_bytes // BLOCK) * BLOCK
        self.slots = capacity // self._stride
        if self.slots < 1:
            raise too_small(capacity, self._stride)
        self._each = max(1, SEGMENT_BYTES // self._stride)  # slots of a segment
        self._files: dict[int, int] = {}
        self._opening = threading.Lock()  # several threads read and write
        self.folder = folder / hashlib.sha256(model.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another server of this model has pages in {folder}",
                hint="give each server a folder of its own",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"kv_offload_disk: {error}", hint="name a folder that you own"
            ) from None

    def measure(self) -> float | None:
        """Bytes per second of cold reads; None: they cannot be measured here."""
        rate = disk_rates(self.folder, TRIED_BYTES)["disk_read_cold"]
        return rate.value if isinstance(rate, Measured) else None

    def filled(self) -> Iterator[Filled]:
        """Slots written by earlier servers; blocks are validated only when they are read."""
        for slot in range(self.slots):
            if not (self.folder / self._name(slot // self._each)).exists():
                continue
            try:
                yield Filled(slot, self._header(slot))
            except (Damaged, OSError):
                continue

    def write(
        self, slot: int, key: bytes, parent: bytes, seconds: float, page_B: np.ndarray
    ) -> None:
        """An OSError: the disk is full, or gone."""
        file, at = self._open(slot)
        header = Header(self.model, key, parent, seconds, zlib.crc32(page_B.data))
        written = msgspec.msgpack.encode(header)
        _write(file, bytes(BLOCK), at)  # a process that dies here leaves an empty slot
        _write(file, page_B.data, at + BLOCK)
        _write(file, MAGIC + len(written).to_bytes(2, "little") + written, at)

    def read(self, slot: int, key: bytes, into_B: np.ndarray) -> None:
        """Damaged: it is not there any more."""
        try:
            header = self._header(slot)
            file, at = self._open(slot)
            if header.key != key:
                raise Damaged("it holds another page")
            read = os.preadv(file, [into_B.data], at + BLOCK)
        except OSError as error:
            raise Damaged(str(error)) from None
        if read != self.page_bytes:
            raise Damaged(f"it ends behind {read} of {self.page_bytes} bytes")
        if zlib.crc32(into_B.data) != header.checksum:
            raise Damaged("its checksum is another")

    def clear(self) -> None:
        """Delete every segment; nothing reads or writes meanwhile. An OSError: some are left."""
        self._close_files()
        for path in self.folder.glob("segment-*"):
            path.unlink()

    def close(self) -> None:
        self._close_files()
        os.close(self._lock)

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def _header(self, slot: int) -> Header:
        file, at = self._open(slot)
        block = os.pread(file, BLOCK, at)
        length = int.from_bytes(block[len(MAGIC) : len(MAGIC) + 2], "little")
        if not block.startswith(MAGIC):
            raise Damaged("it is empty")
        try:
            header = _decode(block[len(MAGIC) + 2 : len(MAGIC) + 2 + length])
        except msgspec.MsgspecError as error:
            raise Damaged(f"its header cannot be read: {error}") from None
        if header.model != self.model:
            raise Damaged(f"it is of another model: {header.model}")
        return header

    def _open(self, slot: int) -> tuple[int, int]:
        """Its file, and where it begins there."""
        segment, place = divmod(slot, self._each)
        with self._opening:
            if segment not in self._files:
                path = self.folder / self._name(segment)
                self._files[segment] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            return self._files[segment], place * self._stride

    @staticmethod
    def _name(segment: int) -> str:
        return f"segment-{segment:05}"


def too_small(capacity: int, page_bytes: int) -> ConfigError:
    needed = format_bytes(page_bytes)
    message = f"kv_offload_disk has {format_bytes(capacity)}, and a page needs {needed}"
    return ConfigError(message, hint="give it more room")


def _write(file: int, data: bytes | memoryview, at: int) -> None:
    view = memoryview(data)
    while view:
        view, at = view[(written := os.pwrite(file, view, at)) :], at + written
