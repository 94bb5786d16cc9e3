"""Fields of a protobuf message by number. What is wrong with a message is reported to its sender.

A field may occur several times; a map is a repeated message of key and value. Knows no message.
"""

import struct

from cairn.core.errors import RequestError
from cairn.core.protobuf_wire import WireError, fields, varints, write_bytes

Fields = dict[int, list[int | bytes]]


def read_fields(data: bytes) -> Fields:
    message: Fields = {}
    try:
        for number, value in fields(data):
            message.setdefault(number, []).append(value)
    except WireError as problem:
        raise RequestError(f"the protobuf message cannot be read: {problem}") from None
    return message


def all_bytes(message: Fields, number: int) -> list[bytes]:
    """Every value of a field of strings, bytes or messages."""
    values = message.get(number, [])
    kept = [value for value in values if isinstance(value, bytes)]
    if len(kept) < len(values):
        raise RequestError(f"field {number} of a protobuf message is a number")
    return kept


def last_bytes(message: Fields, number: int) -> bytes:
    """Value of a field that may occur once; empty if it is absent."""
    return (all_bytes(message, number) or [b""])[-1]


def text(message: Fields, number: int) -> str:
    try:
        return last_bytes(message, number).decode()
    except UnicodeDecodeError:
        raise RequestError(f"field {number} of a protobuf message is no text") from None


def number_of(message: Fields, number: int) -> int:
    """Value of an integer, boolean or enum field; 0 if it is absent."""
    value = message.get(number, [0])[-1]
    if isinstance(value, bytes):
        raise RequestError(f"field {number} of a protobuf message is no integer")
    return value


def double_of(message: Fields, number: int) -> float:
    raw = last_bytes(message, number)
    if len(raw) not in (0, 8):
        raise RequestError(f"field {number} of a protobuf message is no double")
    return struct.unpack("<d", raw)[0] if raw else 0.0


def integers(message: Fields, number: int) -> list[int]:
    """A repeated field of integers, packed or not; small and positive ones, such as the sizes of a tensor."""
    values: list[int] = []
    try:
        for value in message.get(number, []):
            values.extend([value] if isinstance(value, int) else varints(value))
    except WireError as problem:
        raise RequestError(f"field {number} of a protobuf message: {problem}") from None
    return values


def write_entry(number: int, key: str, value: bytes) -> bytes:
    """An entry of a map; `value` is its field 2, written already."""
    return write_bytes(number, write_bytes(1, key.encode()) + value)
