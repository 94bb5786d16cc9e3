"""Layout of a rank's state in contiguous memory, readable by ranks of any parallel layout.

    [step][length of the table][table: name, dtype, whole shape, offsets, own shape, where][about][tensors ...]

Every entry is a piece (`piece.py`): it says where in the whole it belongs. So ranks of another layout can put their own
pieces together from whatever pieces were written: `fill` copies the parts that overlap. Knows neither agents nor steps.
"""

import ctypes
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch import Tensor

from cairn.core.errors import DataError
from cairn.train.checkpoint.piece import Piece

ALIGN = 64
PREFIX = 16  # step and length of the table, 8 bytes each
SPARE = 64 << 10  # the table's text may grow: the recent losses are in it


class Entry(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]  # of the whole tensor
    offsets: tuple[int, ...]
    own: tuple[int, ...]  # shape of this piece
    at: int  # bytes from the beginning of the tensors

    def size(self) -> int:
        return math.prod(self.own) * _dtype(self.dtype).itemsize

    def key(self) -> tuple[Any, ...]:
        return (self.name, self.shape, self.offsets, self.own)


class Table(msgspec.Struct, frozen=True):
    entries: list[Entry]
    about: dict[str, Any]
    data: int  # where the tensors begin


def entries_of(pieces: Mapping[str, Piece]) -> list[Entry]:
    entries, at = [], 0
    for name, piece in pieces.items():
        own = tuple(piece.tensor.shape)
        kind = str(piece.tensor.dtype).removeprefix("torch.")
        entry = Entry(name, kind, piece.shape, piece.offsets, own, at)
        entries.append(entry)
        at = -(-(at + entry.size()) // ALIGN) * ALIGN
    return entries


def room_for(entries: list[Entry], about: Mapping[str, Any]) -> tuple[int, int]:
    """(where the tensors begin, bytes of the whole)."""
    text = len(msgspec.json.encode(Table(entries, dict(about), 0))) + SPARE
    data = -(-(PREFIX + text) // ALIGN) * ALIGN
    return data, data + sum(-(-entry.size() // ALIGN) * ALIGN for entry in entries)


def cuts_of(entries: list[Entry], data: int) -> list[int]:
    """Offsets of the checksummed parts of a copy: the header, then each tensor."""
    return [0, *(data + entry.at for entry in entries if entry.size())]


def write_table(memory: memoryview, table: Table) -> None:
    text = msgspec.json.encode(table)
    if PREFIX + len(text) > table.data:
        raise DataError(
            f"the description of a copy in memory has {len(text):,} bytes, {table.data - PREFIX:,} are there",
            hint="this is a bug in Cairn",
        )
    memory[8:PREFIX] = len(text).to_bytes(8, "little")
    memory[PREFIX : PREFIX + len(text)] = text


def clear_gaps(memory: memoryview, entries: list[Entry], data: int) -> None:
    """Zeros behind each tensor: its checksum goes to where the next one begins, and must count nothing there.

    Memory that a process before this one has used may hold anything, since its tensors may have begun elsewhere.
    """
    for entry in entries:
        end = data + entry.at + entry.size()
        behind = memory[end : data + -(-(entry.at + entry.size()) // ALIGN) * ALIGN]
        behind[:] = bytes(len(behind))


def table_length(prefix: memoryview | bytes) -> int:
    return int.from_bytes(prefix[8:PREFIX], "little")


def read_table(text: memoryview | bytes) -> Table:
    return msgspec.json.decode(text, type=Table)


def tensor_at(memory: Any, entry: Entry, data: int) -> Tensor:
    """The tensor in place: what is written into it is in the memory."""
    count = math.prod(entry.own)
    if count == 0:
        return torch.empty(entry.own, dtype=_dtype(entry.dtype))
    flat = torch.frombuffer(memory, dtype=_dtype(entry.dtype), count=count, offset=data + entry.at)
    return flat.view(entry.own)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a host tensor that lies in one stretch, for as long as the tensor lives."""
    room = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(room).cast(
        "B"
    )  # a tenth of the time that views of tensors take; there may be a thousand


class Source(Protocol):
    """A rank's copy in any location."""

    table: Table

    def read(self, entry: Entry) -> Tensor:
        """The tensor of an entry; not to be kept. Raises if it is not what was written."""
        ...

    def read_into(self, rooms: Sequence[tuple[Entry, Tensor]]) -> None:
        """The whole of each entry into a tensor of its shape. Raises if one is not what was written."""
        ...


def fill(pieces: Mapping[str, Piece], sources: Iterable[Source]) -> None:
    """Writes into the tensors of `pieces` what the sources have of them, the first ones first."""
    missing = {name: piece.tensor.numel() for name, piece in pieces.items() if piece.tensor.numel()}
    filled: set[tuple[Any, ...]] = set()
    for source in sources:
        together: list[tuple[Entry, Tensor]] = []  # what is wanted as it lies there, all at once
        for entry in source.table.entries:
            if entry.name not in missing or entry.key() in filled:
                continue
            filled.add(entry.key())
            piece = pieces[entry.name]
            if _same_cut(piece, entry):
                together.append((entry, piece.tensor))
                missing[entry.name] -= piece.tensor.numel()
            else:
                missing[entry.name] -= _copy_overlap(piece, entry, source)
            if missing[entry.name] == 0:
                del missing[entry.name]
        source.read_into(together)
        if not missing:
            return
    for name, count in missing.items():
        raise DataError(
            f"the copies in memory lack {count:,} numbers of {name} and parts of {len(missing) - 1} other tensors",
            hint="was it written with another model or optimizer? The newest checkpoint on disk is used instead",
        )


def _same_cut(piece: Piece, entry: Entry) -> bool:
    """Return whether a piece is exactly this entry; raises for a different tensor."""
    if entry.shape != piece.shape or entry.dtype != str(piece.tensor.dtype).removeprefix("torch."):
        raise DataError(
            f"{entry.name} is {entry.dtype} {list(entry.shape)} in memory, "
            f"{piece.tensor.dtype} {list(piece.shape)} here",
            hint="was it written with another model or optimizer?",
        )
    return entry.offsets == piece.offsets and entry.own == tuple(piece.tensor.shape)


def _copy_overlap(piece: Piece, entry: Entry, source: Source) -> int:
    here, there = [], []
    rows = zip(piece.offsets, piece.tensor.shape, entry.offsets, entry.own, strict=True)
    for begin, size, other, other_size in rows:
        low, high = max(begin, other), min(begin + size, other + other_size)
        if low >= high:
            return 0
        here.append(slice(low - begin, high - begin))
        there.append(slice(low - other, high - other))
    part = source.read(entry)[tuple(there)]
    piece.tensor[tuple(here)].copy_(part)
    return part.numel()


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, name)
