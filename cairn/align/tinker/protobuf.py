"""Fields of a protobuf message by number. What is wrong with a message is reported to its sender.

A field may occur several times; a map is a repeated message of key and value. Knows no message.
"""

import struct

from cairn.core.errors import RequestError
from cairn.core.protobuf_wire import WireError, fields, varints, write_bytes

Fields = dict[int, list[int | bytes]]


def read_fields(data: bytes) -> Fields:
    found: Fields = {}
    try:
        for number, value in fields(data):
            found.setdefault(number, []).append(value)
    except WireError as problem:
        raise RequestError(f"the protobuf message cannot be read: {problem}") from None
    return found


def all_bytes(found: Fields, number: int) -> list[bytes]:
    """Every value of a field of strings, bytes or messages."""
    values = found.get(number, [])
    kept = [value for value in values if isinstance(value, bytes)]
    if len(kept) < len(values):
        raise RequestError(f"field {number} of a protobuf message is a number")
    return kept


def last_bytes(found: Fields, number: int) -> bytes:
    """Of a field that may occur once; empty where it is absent."""
    return (all_bytes(found, number) or [b""])[-1]


def text(found: Fields, number: int) -> str:
    try:
        return last_bytes(found, number).decode()
    except UnicodeDecodeError:
        raise RequestError(f"field {number} of a protobuf message is no text") from None


def number_of(found: Fields, number: int) -> int:
    """Of a field of integers, truth values or an enum; 0 where it is absent."""
    value = found.get(number, [0])[-1]
    if isinstance(value, bytes):
        raise RequestError(f"field {number} of a protobuf message is no integer")
    return value


def double_of(found: Fields, number: int) -> float:
    raw = last_bytes(found, number)
    if len(raw) not in (0, 8):
        raise RequestError(f"field {number} of a protobuf message is no double")
    return struct.unpack("<d", raw)[0] if raw else 0.0


def integers(found: Fields, number: int) -> list[int]:
    """A repeated field of integers, packed or not; small and positive ones, such as the sizes of a tensor."""
    made: list[int] = []
    try:
        for value in found.get(number, []):
            made.extend([value] if isinstance(value, int) else varints(value))
    except WireError as problem:
        raise RequestError(f"field {number} of a protobuf message: {problem}") from None
    return made


def write_entry(number: int, key: str, value: bytes) -> bytes:
    """An entry of a map; `value` is its field 2, written already."""
    return write_bytes(number, write_bytes(1, key.encode()) + value)
