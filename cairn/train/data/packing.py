"""Best-fit packing of documents into samples; the plan is computed once and stored.

    capacity 8     documents of  5 3 6 2 4 4          first the long ones, each where it leaves the least room
    bins           [6 2] [5 3] [4 4]                  nothing is cut, and little is padding

A document is never split while it fits. One that is longer than a sample is refused, or cut into pieces that
follow each other, as configured; no token is lost either way. Knows lengths only, not what is packed.
"""

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from cairn.core.errors import DataError

TooLong = Literal["refuse", "cut"]
PLAN_VERSION = 1


class Piece(NamedTuple):
    document: int
    start: int  # within the document
    length: int


class Plan(NamedTuple):
    """Pieces by bin: bin b holds the pieces edges[b] to edges[b + 1] - 1."""

    capacity: int
    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    edges: np.ndarray

    @property
    def bins(self) -> int:
        return len(self.edges) - 1

    @property
    def filled(self) -> float:
        """Share of tokens in all bins; the rest is padding."""
        return float(self.length.sum()) / max(1, self.bins * self.capacity)

    def pieces(self, bin: int) -> list[Piece]:
        chosen = slice(int(self.edges[bin]), int(self.edges[bin + 1]))
        columns = (self.document[chosen], self.start[chosen], self.length[chosen])
        return [Piece(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def plan_best_fit(
    lengths: Sequence[int] | np.ndarray, capacity: int, too_long: TooLong = "refuse"
) -> Plan:
    """Longest first, each into the bin that it fills best. O(n) steps on bit sets of `capacity` bits."""
    lengths = np.asarray(lengths, np.int64)
    document, start, length = _pieces(lengths, capacity, too_long)
    bin_of = _best_fit(length[(order := np.argsort(-length, kind="stable"))].tolist(), capacity)
    by_bin = np.argsort(bin_of, kind="stable")  # keeps the order of placement within a bin
    counts = np.bincount(bin_of, minlength=0) if len(bin_of) else np.zeros(0, np.int64)
    order = order[by_bin]
    edges = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return Plan(capacity, document[order], start[order], length[order], edges)


def _best_fit(lengths: Sequence[int], capacity: int) -> np.ndarray:
    """The bin of each length, in the order given."""
    by_space: dict[int, list[int]] = {}  # open bins by the room they have left
    spaces = 0  # bit s is set while a bin with room s is open
    bins = 0
    chosen = np.empty(len(lengths), np.int64)
    for at, length in enumerate(lengths):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            bin = by_space[space].pop()
            if not by_space[space]:
                spaces ^= 1 << space
        else:
            space, bin = capacity, bins
            bins += 1
        chosen[at] = bin
        if left := space - length:
            by_space.setdefault(left, []).append(bin)
            spaces |= 1 << left
    return chosen


def _pieces(
    lengths: np.ndarray, capacity: int, too_long: TooLong
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Document, start and length of everything that has to be placed."""
    longer = np.nonzero(lengths > capacity)[0]
    if len(longer) and too_long == "refuse":
        worst = int(longer[np.argmax(lengths[longer])])
        raise DataError(
            f"{len(longer)} of {len(lengths)} documents are longer than a sequence of {capacity} tokens; "
            f"the longest, document {worst}, has {int(lengths[worst])}",
            hint=f"raise data.sequence to {int(lengths[worst])}, or set data.too_long to cut",
        )
    counts = -(-lengths // capacity)  # 0 for an empty document, which takes no place
    document = np.repeat(np.arange(len(lengths)), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = nth * capacity
    return document, start, np.minimum(capacity, lengths[document] - start)


def cached_plan(lengths: np.ndarray, capacity: int, too_long: TooLong, folder: Path | None) -> Plan:
    """The plan from `folder` when it was made for the same lengths, else a new one, kept there for next time."""
    if folder is None:
        return plan_best_fit(lengths, capacity, too_long)
    key = zlib.crc32(np.asarray(lengths, "<i8").tobytes())
    path = folder / f"plan-{capacity}-{too_long}-{key:08x}.v{PLAN_VERSION}.npz"
    plan = _read(path, capacity)
    if plan is None:
        plan = plan_best_fit(lengths, capacity, too_long)
        _write(path, plan)
    return plan


def _read(path: Path, capacity: int) -> Plan | None:
    """Read a stored plan; None if it is missing or damaged, since it can be recomputed."""
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as saved:
            columns = [saved[name] for name in ("document", "start", "length", "edges")]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
    return Plan(capacity, *columns)


def _write(path: Path, plan: Plan) -> None:
    """All or nothing; a folder that cannot be written costs a new plan next time, nothing more."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    columns = {name: getattr(plan, name) for name in ("document", "start", "length", "edges")}
    try:
        with fresh.open("wb") as file:
            np.savez(file, **columns)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
