"""Findings of the doctor, and the facts they are derived from.

    files, probes -> facts (this module) -> rules -> findings

A finding names one cause, where it is, and the lines of evidence that a person can check. Readers
make facts, rules make findings; neither knows the other.
"""

from typing import Literal

import msgspec

Cause = Literal[
    "message too small",
    "wrong interface",
    "transport downgrade",
    "rank mapping",
    "slow link",
    "lossy link",
    "slow host",
    "straggler",
    "slow network",
    "hang",
    "mismatch",
    "wrong result",
]


class CommFinding(msgspec.Struct, frozen=True, kw_only=True):
    cause: Cause
    where: str  # rank, host, link, file
    evidence: list[str]
    advice: str


class RecordedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A collective as one rank saw it."""

    group: str
    sequence: int
    op: str
    shapes: str  # of inputs, as text
    dtypes: str
    elements: int
    entered_ns: int
    done: bool
    started: bool = True  # False: it waits behind others on its stream
    refused: bool = False  # called when the group had failed already: too late to be waited for
    ended_ns: int | None = None
    frame: str = ""  # where in the program


class RankTrace(msgspec.Struct, frozen=True, kw_only=True):
    """The flight recorder of one rank."""

    rank: int
    calls: list[RecordedCall]
    groups: dict[str, list[int]]  # members; empty where the dump does not say
    source: str


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A finished collective with its time, of one rank."""

    communicator: str
    rank: int
    ranks: int
    nodes: int
    host: str
    op: str
    sequence: int
    bytes: int
    us: float
    busbw_gb_per_s: float


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    host: str
    interface: str
    address: str


class PairProbe(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of `cairn comm doctor --probe`: every pair of ranks, several times."""

    kind: str = "cairn comm probe"
    bytes: int
    facts: list[RankFacts]
    pair_us: list[list[list[float]]]  # [from][to]: a message and its acknowledgement, each time
    compute_us: list[float]  # the same piece of work on every rank, its best time


def ranked(ranks: list[int], most: int = 8) -> str:
    """rank 3; ranks 1, 2, 5; ranks 0, 1, .. (512 in all)"""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:most]))
    return f"ranks {shown}" + (f", .. ({len(ranks)} in all)" if len(ranks) > most else "")
