"""Transfer plan: which rank sends which bytes to which rank, for any layout on either side.

    targets (shards)  x  sources (shards)  ->  legs: source rank -> target rank, runs of bytes

Every element that is wanted comes exactly once, from one of the ranks that hold it. Where several hold the same
(replicas: a latent cache, a head shared by ranks, data parallel weights), the work is shared out: whole pieces if that
already keeps them equally busy, otherwise pieces are cut. Pure; `tests` move element by element beside it.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from cairn.comm.transfer.balance import BalancedPiece, share_out
from cairn.comm.transfer.byte_runs import ByteRuns, merged, runs_between, written_twice
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.shard import Box, TensorShard, overlap


class Leg(NamedTuple):
    """Everything that one rank's region gives to another's."""

    source_rank: int
    source_region: str
    target_rank: int
    target_region: str
    runs: ByteRuns
    # Bytes of a target element for each byte of a source element; where it is not 1, see `cast`.
    widening: float = 1.0


class TransferPlan(NamedTuple):
    legs: tuple[Leg, ...]

    @property
    def nbytes(self) -> int:
        return sum(leg.runs.nbytes for leg in self.legs)

    def to_rank(self, rank: int) -> list[Leg]:
        return [leg for leg in self.legs if leg.target_rank == rank]

    def sent(self) -> dict[int, int]:
        """Bytes by source rank."""
        total: dict[int, int] = defaultdict(int)
        for leg in self.legs:
            total[leg.source_rank] += leg.runs.nbytes
        return dict(total)


def make_plan(
    sources: Sequence[TensorShard], targets: Sequence[TensorShard], same_ranks: bool = False
) -> TransferPlan:
    """`same_ranks`: both sides are the same processes, so what a rank holds itself it takes from itself."""
    by_tensor: dict[str, list[TensorShard]] = defaultdict(list)
    for shard in sources:
        by_tensor[shard.tensor].append(shard)
    pieces = [
        piece
        for target in targets
        for piece in _pieces(by_tensor[target.tensor], target, same_ranks)
    ]
    parts: dict[tuple[int, str, int, str, float], list[ByteRuns]] = defaultdict(list)
    for source, target, box in share_out(pieces):
        widening = target.itemsize / source.itemsize
        pair = (source.rank, source.region, target.rank, target.region, widening)
        parts[pair].append(runs_between(source, target, box))
    legs = [
        Leg(*pair[:4], merged(found, pair[4]), pair[4]) for pair, found in sorted(parts.items())
    ]
    _check_targets(legs)
    return TransferPlan(tuple(legs))


def _pieces(
    sources: list[TensorShard], target: TensorShard, same_ranks: bool
) -> Iterable[BalancedPiece]:
    """The target cut where the set of its holders changes."""
    near = [(shard, both) for shard in sources if (both := overlap(shard.box, target.box))]
    edges = [
        sorted({*target.box[axis], *(edge for _, both in near for edge in both[axis])})
        for axis in range(len(target.box))
    ]
    if not target.elements:
        return
    for box in itertools.product(*(itertools.pairwise(axis) for axis in edges)):
        holders = [shard for shard, both in near if overlap(both, box) == box]
        if not holders:
            raise TransferError(
                f"no rank holds {target.tensor}{_words(box)}, which rank {target.rank} wants",
                hint="the source layout has to cover the whole tensor: check layers and tokens",
            )
        own = [shard for shard in holders if same_ranks and shard.rank == target.rank]
        yield BalancedPiece(target, box, tuple(_once_each(own or holders)))


def _once_each(holders: list[TensorShard]) -> list[TensorShard]:
    """Keep one shard of each rank."""
    return list({shard.rank: shard for shard in reversed(holders)}.values())[::-1]


def _check_targets(legs: list[Leg]) -> None:
    """No byte may be written twice: two shards of one rank that overlap would race."""
    regions: dict[tuple[int, str], list[Leg]] = defaultdict(list)
    for leg in legs:
        regions[leg.target_rank, leg.target_region].append(leg)
    for (rank, region), into in regions.items():
        starts = np.concatenate([leg.runs.target for leg in into])
        sizes = np.concatenate([leg.runs.sizes * leg.widening for leg in into]).astype(np.int64)
        byte = written_twice(starts, sizes)
        if byte is not None:
            raise TransferError(
                f"byte {byte:,} of {region} on rank {rank} would be written twice",
                hint="a target's pages and slices must not overlap",
            )


def _words(box: Box) -> str:
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in box) + "]"
