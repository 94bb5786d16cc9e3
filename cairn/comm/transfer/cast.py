"""A hand-over between caches of different number types: the bytes travel as they are, the target converts.

    source pages --runs--> landing place of the target, packed --convert--> target pages

float32, float16 and bfloat16 into each other, rounded to nearest even. Types of 8 bits need scales, which are tensors
of their own: a plan moves them like any other, but no conversion is made up for them here.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.copies import Bytes
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.plan import Leg

FLOATS = ("float32", "float16", "bfloat16")
LANDING = "landing"  # the region of a target in which bytes arrive


class Landing(NamedTuple):
    """A leg whose bytes arrive packed, and how they go on from there."""

    leg: Leg  # source -> landing
    onwards: ByteRuns  # landing -> target; sizes in bytes of the source's type


def landed(leg: Leg) -> Landing:
    """The same leg with a stop in between; the landing region needs `leg.runs.nbytes` bytes."""
    ends = np.cumsum(leg.runs.sizes)
    starts = ends - leg.runs.sizes
    to_landing = leg.runs._replace(target=starts)
    onwards = leg.runs._replace(source=starts)
    return Landing(leg._replace(target_region=LANDING, runs=to_landing, widening=1.0), onwards)


def convert(landing: Bytes, target: Bytes, onwards: ByteRuns, kinds: tuple[str, str]) -> None:
    """`kinds`: what the bytes are, and what the target keeps."""
    check_kinds(*kinds)
    read, write = kinds
    narrow, wide = (4 if kind == "float32" else 2 for kind in kinds)
    rows = zip(
        onwards.source.tolist(), onwards.target.tolist(), onwards.sizes.tolist(), strict=True
    )
    for origin, goal, size in rows:
        numbers = to_float32(landing[origin : origin + size], read)
        target[goal : goal + size // narrow * wide] = from_float32(numbers, write)


def check_kinds(read: str, write: str) -> None:
    unknown = [kind for kind in (read, write) if kind not in FLOATS]
    if unknown:
        raise TransferError(
            f"KV of {read} cannot become {write}: {unknown[0]} has scales of its own",
            hint=f"use one dtype on both sides; these convert: {', '.join(FLOATS)}",
        )


def to_float32(raw: Bytes, kind: str) -> NDArray[np.float32]:
    if kind == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(np.float16 if kind == "float16" else np.float32).astype(np.float32)


def from_float32(numbers: NDArray[np.float32], kind: str) -> Bytes:
    if kind == "float32":
        return numbers.view(np.uint8)
    if kind == "float16":
        return numbers.astype(np.float16).view(np.uint8)
    bits = numbers.view(np.uint32)
    # Half of the last kept bit, less one when that bit is 0: ties go to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    not_a_number = np.isnan(numbers)
    kept = np.where(not_a_number, (bits >> 16) | 0x40, rounded)
    return kept.astype(np.uint16).view(np.uint8)
