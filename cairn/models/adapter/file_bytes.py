"""The bytes of an adapter's file on the device: read by several threads, on a stream where no model runs.

    file -> pinned pieces -> the device        no step waits for it

Knows what the file's header says, and no model: `prepared` says where each tensor belongs.
"""

import os
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cairn.models.adapter.folder import unreadable

TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
PIECE = 8 << 20  # bytes of the file that a thread moves at a time
READERS = 4
LENGTH = 8  # bytes in which a file says how long its header is


class StoredTensorHeader(msgspec.Struct, frozen=True):
    """Header entry of a tensor in a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FileBytes(NamedTuple):
    stored: dict[str, StoredTensorHeader]
    raw: Tensor  # all tensors of the file, in its type and order


class FileReader:
    """Reads files onto one device, one at a time. `stream`: where a file may be used until that is synchronised."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        self._pieces: list[Tensor] = []  # pinned: of each thread of `_pool`
        self._pool = ThreadPoolExecutor(READERS)

    @property
    def stream(self) -> torch.cuda.Stream:
        if self._stream is None:
            # One for all files: the memory of a stream is kept for its next file.
            self._stream = torch.cuda.Stream(self.device)
        return self._stream

    def read(self, file: Path) -> FileBytes | None:
        """Read a file; None if its tensors have several dtypes or one that adapters do not support."""
        start, stored = read_header(file)
        types = {one.dtype for one in stored.values()}
        if len(types) != 1 or not types <= TYPES.keys():
            return None
        size = max(one.data_offsets[1] for one in stored.values())
        return FileBytes(stored, self._raw(file, start, size).view(TYPES[types.pop()]))

    def warm_up(self, dtype: torch.dtype, numbers: int) -> None:
        """Takes memory, pinned and on the device, which the allocator keeps, and casts once: no file waits for it.

        `numbers`: as many as a usual adapter has.
        """
        if self.device.type != "cuda":
            return
        # In memory: a container may have no place for files.
        with open(os.memfd_create("blank adapter"), "r+b") as file, torch.cuda.stream(self.stream):
            # Threads and copies that have run once: the first to do so take several times as long.
            file.truncate(READERS * PIECE)
            there = torch.empty(READERS * PIECE, dtype=torch.uint8, device=self.device)
            self._upload(file.fileno(), Path("a blank file"), 0, there)
            del there
            # A file in float32, and what it is cast to.
            both = (torch.float32, dtype)
            room = [torch.empty(numbers, dtype=kind, device=self.device) for kind in both]
            for kind in TYPES.values():
                raw = self._pieces[0][:256].to(self.device, non_blocking=True).view(kind)
                cast_to = torch.empty_like(raw, dtype=dtype)
                torch._foreach_copy_([cast_to, cast_to], [raw, raw])
        self.stream.synchronize()
        del room

    def _raw(self, file: Path, start: int, size: int) -> Tensor:
        if self.device.type != "cuda":
            raw = torch.empty(size, dtype=torch.uint8)
            with file.open("rb") as opened:
                _read_into(raw, opened.fileno(), start, file)
            return raw
        with torch.cuda.stream(self.stream):
            raw = torch.empty(size, dtype=torch.uint8, device=self.device)
            with file.open("rb") as opened:
                self._upload(opened.fileno(), file, start, raw)
        return raw

    def _upload(self, descriptor: int, file: Path, start: int, there: Tensor) -> None:
        """Reads a file behind `start`; each thread copies its pieces from memory that the device can read."""
        if not self._pieces:
            self._pieces = [
                torch.empty(PIECE, dtype=torch.uint8, pin_memory=True) for _ in range(READERS)
            ]

        def move(first: int) -> None:
            piece = self._pieces[first]
            for begin in range(first * PIECE, len(there), READERS * PIECE):
                count = min(PIECE, len(there) - begin)
                _read_into(piece[:count], descriptor, start + begin, file)
                with torch.cuda.stream(self.stream):
                    there[begin : begin + count].copy_(piece[:count], non_blocking=True)
                    self.stream.record_event().synchronize()

        moving = [self._pool.submit(move, first) for first in range(READERS)]
        wait(moving)  # for all, also if one has failed: file and pieces are not theirs any more
        for one in moving:
            one.result()


def read_header(file: Path) -> tuple[int, dict[str, StoredTensorHeader]]:
    """Return the data offset and the tensors of a file, which the safetensors library validates first."""
    try:
        with safe_open(file, framework="pt"), file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH), "little")
            fields = msgspec.json.decode(opened.read(length))
    except (SafetensorError, OSError) as error:
        raise unreadable(file, error) from None
    fields.pop("__metadata__", None)
    return LENGTH + length, msgspec.convert(fields, dict[str, StoredTensorHeader])


def _read_into(there: Tensor, descriptor: int, start: int, file: Path) -> None:
    buffer, done = memoryview(cast(Any, there.numpy())), 0
    while done < len(there):  # one call reads 2 GiB at most
        read = os.preadv(descriptor, [buffer[done:]], start + done)
        if not read:
            raise unreadable(file, OSError("it has become shorter"))
        done += read
