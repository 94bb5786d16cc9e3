"""The wire format of Protocol Buffers, as far as the messages of `wire` need it.

    key = field number << 3 | kind        kind 0: varint   1: eight bytes   2: length, bytes   5: four bytes

A message is read as its fields by number, each with all its values in order; what a number means is known to who asks.
Nothing here knows a message.
"""

import struct
from collections.abc import Iterable

from cairn.core.errors import RequestError

VARINT, EIGHT, BYTES, FOUR = 0, 1, 2, 5
Fields = dict[int, list[int | bytes]]


def read_fields(data: bytes) -> Fields:
    """Numbers as they are on the wire: varints as int, everything else as bytes."""
    found: Fields = {}
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = _varint(data, at)
            found.setdefault(number, []).append(value)
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (EIGHT, FOUR):
            size = 8 if kind == EIGHT else 4
        else:
            raise RequestError(f"field {number} of a protobuf message has kind {kind}")
        if at + size > len(data):
            raise RequestError(f"a protobuf message ends inside field {number}")
        found.setdefault(number, []).append(data[at : at + size])
        at += size
    return found


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise RequestError("a protobuf message ends inside a number")


def all_bytes(fields: Fields, number: int) -> list[bytes]:
    """Every value of a field of strings, bytes or messages."""
    values = fields.get(number, [])
    wrong = [value for value in values if not isinstance(value, bytes)]
    if wrong:
        raise RequestError(f"field {number} of a protobuf message is a number")
    return [value for value in values if isinstance(value, bytes)]


def last_bytes(fields: Fields, number: int) -> bytes:
    """Of a field that may occur once; empty where it is absent."""
    values = all_bytes(fields, number)
    return values[-1] if values else b""


def text(fields: Fields, number: int) -> str:
    try:
        return last_bytes(fields, number).decode()
    except UnicodeDecodeError:
        raise RequestError(f"field {number} of a protobuf message is no text") from None


def number_of(fields: Fields, number: int) -> int:
    """Of a field of integers, truth values or an enum; 0 where it is absent."""
    value = fields.get(number, [0])[-1]
    if isinstance(value, bytes):
        raise RequestError(f"field {number} of a protobuf message is no integer")
    return value - (1 << 64) if value >> 63 else value


def double_of(fields: Fields, number: int) -> float:
    raw = last_bytes(fields, number)
    if len(raw) not in (0, 8):
        raise RequestError(f"field {number} of a protobuf message is no double")
    return struct.unpack("<d", raw)[0] if raw else 0.0


def integers(fields: Fields, number: int) -> list[int]:
    """A repeated field of integers, packed or not."""
    found = []
    for value in fields.get(number, []):
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            one, at = _varint(value, at)
            found.append(one)
    return found


def write_varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    made.append(value)
    return bytes(made)


def write_number(number: int, value: int) -> bytes:
    return write_varint(number << 3 | VARINT) + write_varint(value)


def write_double(number: int, value: float) -> bytes:
    return write_varint(number << 3 | EIGHT) + struct.pack("<d", value)


def write_bytes(number: int, value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return write_varint(number << 3 | BYTES) + write_varint(len(raw)) + raw


def write_entry(number: int, key: str, value: bytes) -> bytes:
    """An entry of a map; `value` is its field 2, written already."""
    return write_bytes(number, write_bytes(1, key) + value)


def write_all(number: int, values: Iterable[bytes]) -> bytes:
    return b"".join(write_bytes(number, value) for value in values)
