"""Load balancing between ranks that hold the same bytes.

    whole   each piece from the holder that has the least to do
    cut     each piece over all its holders, so that they end level (water into vessels)

Both are tried and the one with the less busy busiest rank is taken; on a tie `whole`, which needs fewer connections.
Pieces with few holders go first, because they have no choice. Where holder sets are disjoint or nested, as tensor and
data parallel replicas are, that is the best there is but for one slice of rounding. Pure.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from cairn.comm.transfer.shard import Box, TensorShard, volume


class BalancedPiece(NamedTuple):
    target: TensorShard
    box: Box
    holders: tuple[TensorShard, ...]  # of different ranks


class RankShare(NamedTuple):
    source: TensorShard
    target: TensorShard
    box: Box


def share_out(pieces: Sequence[BalancedPiece]) -> list[RankShare]:
    ordered = sorted(pieces, key=lambda piece: (len(piece.holders), -volume(piece.box)))
    whole = _whole(ordered)
    if all(len(piece.holders) == 1 for piece in pieces):
        return whole
    cut = _cut(ordered)
    return whole if _busiest(whole) <= _busiest(cut) else cut


def _whole(pieces: Sequence[BalancedPiece]) -> list[RankShare]:
    load: dict[int, int] = defaultdict(int)
    shares = []
    for target, box, holders in pieces:
        # On a tie, target i takes from holder i: with equal numbers on both sides each has a partner.
        turn = target.rank % len(holders)
        in_turn = [*holders[turn:], *holders[:turn]]
        source = min(in_turn, key=lambda shard: load[shard.rank])
        load[source.rank] += volume(box) * source.itemsize
        shares.append(RankShare(source, target, box))
    return shares


def _cut(pieces: Sequence[BalancedPiece]) -> list[RankShare]:
    load: dict[int, int] = defaultdict(int)
    shares = []
    for target, box, holders in pieces:
        axis = _cut_axis(box, len(holders))
        start, stop = box[axis] if box else (0, 1)
        slice_bytes = volume(box) * holders[0].itemsize // (stop - start)
        levels = [load[shard.rank] for shard in holders]
        for source, count in zip(holders, fill(levels, stop - start, slice_bytes), strict=True):
            if count:
                part = (*box[:axis], (start, start + count), *box[axis + 1 :]) if box else box
                shares.append(RankShare(source, target, part))
                load[source.rank] += count * slice_bytes
                start += count
    return shares


def fill(levels: Sequence[int], slices: int, slice_bytes: int) -> list[int]:
    """Distribute `slices` over the ranks so that the highest level is minimal."""
    given = [0] * len(levels)
    if len(levels) == 1:
        return [slices]
    # The level at which the water stands: raise the lowest until all is poured out.
    order = sorted(range(len(levels)), key=lambda place: levels[place])
    left, total = slices * slice_bytes, 0
    water = 0.0
    for count, place in enumerate(order, 1):
        total += levels[place]
        water = (left + total) / count
        if count == len(order) or levels[order[count]] >= water:
            break
    for place in range(len(levels)):
        given[place] = max(0, int((water - levels[place]) // slice_bytes))
    for _ in range(slices - sum(given)):  # what rounding down has left
        lowest = min(order, key=lambda place: levels[place] + given[place] * slice_bytes)
        given[lowest] += 1
    return given


def _cut_axis(box: Box, holders: int) -> int:
    """The outermost axis that is long enough: cutting further in would shorten runs."""
    extents = [stop - start for start, stop in box]
    enough = [axis for axis, extent in enumerate(extents) if extent >= holders]
    if enough:
        return enough[0]
    return max(range(len(extents)), key=extents.__getitem__) if extents else 0


def _busiest(shares: Sequence[RankShare]) -> int:
    load: dict[int, int] = defaultdict(int)
    for source, _, box in shares:
        load[source.rank] += volume(box) * source.itemsize
    return max(load.values(), default=0)
