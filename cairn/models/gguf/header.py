"""Header of a GGUF file: metadata, and the type and offset of each tensor.

Parses the container alone and trusts nothing in it: every length is compared with what is left of
the file before it is used, so a damaged file costs an error, never a hang or a large allocation. It
does not know what an architecture, a metadata key or a tensor name means, and reads no weights.

    magic version counts | key type value, ... | name shape type offset, ... | padding | tensor data

The `gguf` package has a reader too, which takes seconds for a vocabulary of 50,000 tokens.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from cairn.core.errors import WeightsError
from cairn.models.gguf.block_types import BLOCK_TYPES, BlockType

_FETCH_AGAIN = "the file is damaged or incompletely downloaded: fetch it again"
_VERSIONS = (2, 3)  # version 1 counts with 32 bits and was in use for some weeks of 2023
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_STRING, _ARRAY = 8, 9
_NUMBERS = {  # GGUF's value types
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
# Several times what the largest vocabulary needs. They bound what a damaged length can allocate.
_MOST_ITEMS = 1 << 22
_LONGEST_STRING_BYTES = 1 << 26
_LONGEST_NAME_BYTES = 1 << 10
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT_BYTES = 32


class StoredTensor(msgspec.Struct, frozen=True):
    name: str
    shape: tuple[int, ...]  # outermost first, as torch has it; the file has it reversed
    block: BlockType
    start: int  # byte in the file
    size_bytes: int


class GGUFHeader(msgspec.Struct, frozen=True):
    path: Path
    metadata: dict[str, object]
    tensors: dict[str, StoredTensor]


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    cursor = _Cursor(path, data)
    _check_magic_and_version(cursor)
    tensor_count = cursor.count("tensors", least_bytes=8 + 4 + 8 + 4 + 8)
    key_count = cursor.count("metadata keys", least_bytes=8 + 4 + 1)
    metadata: dict[str, object] = {}
    for _ in range(key_count):
        key = cursor.name("a metadata key")
        if key in metadata:
            cursor.refuse(f"has the metadata key {key!r} twice")
        metadata[key] = cursor.value(key)
    unplaced = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    return GGUFHeader(path, metadata, _place(cursor, unplaced, _alignment(cursor, metadata)))


class _Cursor:
    """A position in the file, which moves over one thing at a time and never past the end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.at = 0
        self.end = len(data)

    def refuse(self, what: str, hint: str = _FETCH_AGAIN) -> NoReturn:
        raise WeightsError(f"{self.path} {what}", hint=hint)

    def require(self, needed: int, what: str) -> None:
        left = self.end - self.at
        if needed > left:
            self.refuse(
                f"ends inside {what}: {needed} bytes expected at byte {self.at}, {left} left"
            )

    def integer(self, kind: struct.Struct, what: str) -> int:
        self.require(kind.size, what)
        (number,) = kind.unpack_from(self.data, self.at)
        self.at += kind.size
        return number

    def count(self, what: str, least_bytes: int) -> int:
        """Read a count and check that the file has at least `least_bytes` for each item."""
        number = self.integer(_U64, f"the number of {what}")
        self.require(number * least_bytes, f"{number} {what}")
        if number > _MOST_ITEMS:
            self.refuse(f"claims {number} {what}, more than the {_MOST_ITEMS} that are allowed")
        return number

    def name(self, what: str) -> str:
        return self.strings(1, what, longest_bytes=_LONGEST_NAME_BYTES)[0]

    def strings(self, count: int, what: str, longest_bytes: int) -> list[str]:
        """A vocabulary has some hundred thousand of these: one flat loop, for speed."""
        data, at, end, unpack = self.data, self.at, self.end, _U64.unpack_from
        found: list[bytes] = []
        for _ in range(count):
            if at + 8 > end or (length := unpack(data, at)[0]) > min(end - at - 8, longest_bytes):
                self.at = at
                self._refuse_string(what, longest_bytes)
            at += 8 + length
            found.append(data[at - length : at])
        self.at = at
        try:
            return [text.decode() for text in found]
        except UnicodeDecodeError as error:
            self.refuse(f"has text that is not UTF-8 in {what}: {error.object[:40]!r}")

    def _refuse_string(self, what: str, longest_bytes: int) -> NoReturn:
        length = self.integer(_U64, what)
        self.require(length, what)
        self.refuse(f"has {length} bytes of text in {what}, where {longest_bytes} are allowed")

    def numbers(self, type_code: int, count: int, what: str) -> list[object]:
        dtype = np.dtype(_NUMBERS[type_code])
        self.require(count * dtype.itemsize, what)
        values = np.frombuffer(self.data, dtype, count, self.at).tolist()
        self.at += count * dtype.itemsize
        return values

    def value(self, key: str) -> object:
        what = f"the value of {key!r}"
        type_code = self.integer(_U32, what)
        if type_code == _STRING:
            return self.strings(1, what, _LONGEST_STRING_BYTES)[0]
        if type_code in _NUMBERS:
            return self.numbers(type_code, 1, what)[0]
        if type_code != _ARRAY:
            self.refuse(f"has the unknown value type {type_code} at {key!r}")
        item_code = self.integer(_U32, what)
        if item_code == _STRING:
            count = self.count(f"strings in {key!r}", least_bytes=8)
            return self.strings(count, what, _LONGEST_STRING_BYTES)
        if item_code not in _NUMBERS:  # arrays of arrays exist on paper; no file has them
            self.refuse(f"has an array of the unknown value type {item_code} at {key!r}")
        return self.numbers(item_code, self.count(f"numbers in {key!r}", least_bytes=1), what)


def _check_magic_and_version(cursor: _Cursor) -> None:
    cursor.require(8, "its first line")
    magic, version = cursor.data[:4], _U32.unpack_from(cursor.data, 4)[0]
    if magic != b"GGUF":
        cursor.refuse(
            f"is not a GGUF file: it begins with {magic!r}, not b'GGUF'",
            hint="give a .gguf file, or a folder with config.json",
        )
    if version not in _VERSIONS and version & 0xFFFF == 0:
        cursor.refuse("is a big-endian GGUF file", hint="download the little-endian one")
    if version not in _VERSIONS:
        cursor.refuse(
            f"is GGUF version {version}; versions 2 and 3 are read",
            hint="convert the model again with a current llama.cpp",
        )
    cursor.at = 8


def _alignment(cursor: _Cursor, metadata: dict[str, object]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        cursor.refuse(f"has general.alignment {alignment!r}, not a power of two of at least 8")
    return alignment


class _TensorInfo(msgspec.Struct, frozen=True):
    """A tensor whose place is still relative to where the tensor data begins."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    offset: int


def _read_tensor_info(cursor: _Cursor) -> _TensorInfo:
    name = cursor.name("a tensor's name")
    what = f"the description of tensor {name!r}"
    dimensions = cursor.integer(_U32, what)
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        cursor.refuse(f"has tensor {name!r} with {dimensions} dimensions, not 1 to 4")
    shape = tuple(cursor.integer(_U64, what) for _ in range(dimensions))[::-1]
    block = _block_type(cursor, name, cursor.integer(_U32, what))
    offset = cursor.integer(_U64, what)
    if 0 in shape or shape[-1] % block.elements:
        cursor.refuse(
            f"has tensor {name!r} of shape {shape}, which {block.name} cannot store in blocks of"
            f" {block.elements}"
        )
    return _TensorInfo(name, shape, block, offset)


def _block_type(cursor: _Cursor, tensor: str, code: int) -> BlockType:
    if (block := BLOCK_TYPES.get(code)) is None:
        cursor.refuse(
            f"has tensor {tensor!r} in the unknown quantisation type {code}",
            hint="use another quantisation",
        )
    return block


def _place(cursor: _Cursor, unplaced: list[_TensorInfo], alignment: int) -> dict[str, StoredTensor]:
    """Absolute places, each within the file and beside the others."""
    data_start = -(-cursor.at // alignment) * alignment
    tensors: dict[str, StoredTensor] = {}
    taken_until = 0
    for info in sorted(unplaced, key=lambda info: info.offset):
        size = math.prod(info.shape) // info.block.elements * info.block.size_bytes
        start = data_start + info.offset
        if info.name in tensors:
            cursor.refuse(f"has the tensor {info.name!r} twice")
        if info.offset % alignment or start < taken_until:
            cursor.refuse(
                f"has tensor {info.name!r} at offset {info.offset}, across another one"
                f" or between multiples of {alignment}"
            )
        if start + size > cursor.end:
            cursor.refuse(
                f"ends inside tensor {info.name!r}: it needs bytes {start} to"
                f" {start + size}, the file has {cursor.end}"
            )
        tensors[info.name] = StoredTensor(info.name, info.shape, info.block, start, size)
        taken_until = start + size
    return tensors
