"""Messages of protobuf, as bytes: the few kinds of fields that small services need, without a compiler.

key (number << 3 | kind)  value       kind 0: a number      kind 2: a length and bytes      kinds 1, 5: 8 or 4 bytes
"""

import struct
from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
MOST_BITS = 64


class WireError(ValueError):
    """Bytes that are no message."""


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in their order, each with its number."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _read_varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = _read_varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise WireError(f"a field of kind {kind}")
        if at + size > len(data):
            raise WireError("the message ends inside a field")
        yield number, data[at : at + size]
        at += size


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, MOST_BITS, 7):
        if at >= len(data):
            raise WireError("the message ends inside a number")
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise WireError("a number of more than 64 bits")


def varints(data: bytes) -> list[int]:
    """The numbers of a packed field."""
    found, at = [], 0
    while at < len(data):
        value, at = _read_varint(data, at)
        found.append(value)
    return found


def as_bytes(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise WireError("a number where a text belongs")
    return value


def text(value: int | bytes) -> str:
    return as_bytes(value).decode(errors="replace")


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def write_bytes(number: int, data: bytes) -> bytes:
    """A text or a message as a field."""
    return varint(number << 3 | BYTES) + varint(len(data)) + data


def write_number(number: int, value: int) -> bytes:
    return varint(number << 3 | VARINT) + varint(value)


def write_double(number: int, value: float) -> bytes:
    return varint(number << 3 | FIXED64) + struct.pack("<d", value)
