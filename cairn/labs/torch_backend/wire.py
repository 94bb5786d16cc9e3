"""Header of a message: enough for the receiver to check that both ranks execute the same operation.

    | sequence | operation | type | reduction | root or tag | bytes of all | bytes of this |

The first 24 bytes are the same on every rank that calls the same thing (`Call.header`), so that a
comparison of bytes is the whole check. Only when it fails the fields are read.
"""

import struct
from typing import NamedTuple

import torch

from cairn.core.units import format_bytes

OPERATIONS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "barrier", "send", "sparse_all_reduce", "switch_all_reduce",
)  # fmt: skip
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip
REDUCTIONS = ("none", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
OPERATION_NUMBERS = {name: number for number, name in enumerate(OPERATIONS)}
_DTYPE = {dtype: number for number, dtype in enumerate(DTYPES)}
_REDUCTION = {name: number for number, name in enumerate(REDUCTIONS)}
_CALL = struct.Struct("<QBBBxiQ")
_LENGTH = struct.Struct("<Q")
CALL_BYTES = _CALL.size
HEADER_BYTES = CALL_BYTES + _LENGTH.size


class Call(NamedTuple):
    """One operation as this rank calls it."""

    operation: str
    sequence: int
    dtype: torch.dtype
    reduction: str = "none"
    root: int = 0  # of broadcast and the like; the tag of a send
    total: int = 0  # bytes of the whole; 0 where ranks may differ (all_to_all)

    def header(self) -> bytes:
        return _CALL.pack(
            self.sequence,
            OPERATION_NUMBERS[self.operation],
            _DTYPE[self.dtype],
            _REDUCTION[self.reduction],
            self.root,
            self.total,
        )

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch.")]
        if self.total:
            words.append(format_bytes(self.total))
        if self.reduction != "none":
            words.append(self.reduction)
        if self.operation == "send":
            words.append(f"tag {self.root}")
        elif self.root:
            words.append(f"root {self.root}")
        return f"{self.name} ({', '.join(words)})"

    @property
    def name(self) -> str:
        """The name used in messages: the operation and its number in the group."""
        return f"{self.operation} #{self.sequence}"


def length_bytes(length: int) -> bytes:
    return _LENGTH.pack(length)


def length_of(header: bytes) -> int:
    return _LENGTH.unpack_from(header, CALL_BYTES)[0]


def call_of(header: bytes) -> Call | None:
    """The call of a header; None for bytes that are none."""
    sequence, operation, dtype, reduction, root, total = _CALL.unpack_from(header)
    if operation >= len(OPERATIONS) or dtype >= len(DTYPES) or reduction >= len(REDUCTIONS):
        return None
    return Call(OPERATIONS[operation], sequence, DTYPES[dtype], REDUCTIONS[reduction], root, total)


def difference(mine: Call, expected_bytes: int, header: bytes) -> str:
    """Both sides in words: what the peer sent, and what was expected of it."""
    theirs = call_of(header)
    if theirs is None:
        return f"sent bytes that are no message, where {mine} was expected"
    if theirs == mine:
        return f"sent {length_of(header)} bytes in {mine}, where {expected_bytes} were expected"
    return f"does {theirs}, where {mine} was expected"
