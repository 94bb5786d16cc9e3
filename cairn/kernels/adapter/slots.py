"""The host's side of `kernels.adapter.table`: which rows make a tile, and what a slot of the table holds. Pure."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from cairn.kernels.adapter.table import ENTRY, NO_TILE, PARTS, WIDE, tile_block

Tile = tuple[int, int, int, int]  # slot, first row, end, position

EMPTY: Tile = (NO_TILE, 0, 0, 0)


def tiles_of(
    slots_T: Sequence[int], spare: int = 0, positions: Mapping[int, int] | None = None
) -> tuple[list[int], list[Tile], int]:
    """Rows sorted by slot, tiles that cover them, and how many rows a tile may have.

    `spare`: empty tiles behind. `positions`: of slots whose A lies behind the weights.
    """
    block = tile_block(len(slots_T))
    by_slot: dict[int, list[int]] = {}
    for row, slot in enumerate(slots_T):
        by_slot.setdefault(slot, []).append(row)
    rows: list[int] = []
    tiles: list[Tile] = []
    for slot in sorted(by_slot):
        first, members = len(rows), by_slot[slot]
        rows += members
        starts = range(first, len(rows), block)
        at = positions.get(slot, 0) if positions else 0
        tiles += [(slot, start, min(start + block, len(rows)), at) for start in starts]
    return rows, tiles + [EMPTY] * spare, block


def most_tiles(tokens: int, slots: int) -> int:
    """Maximum number of tiles of a step with `tokens` tokens of at most `slots` adapters."""
    return min(tokens, -(-tokens // tile_block(tokens)) + slots)


def entry_of(
    a_RK: Tensor, parts: Sequence[tuple[Tensor | None, float]]
) -> tuple[list[int], list[float]]:
    """Words and scales of a slot for one map. `parts`: B [n, r], packed, and the scale; None where there is none."""
    words, scales = [0] * ENTRY, [0.0] * PARTS
    words[0] = a_RK.data_ptr()
    for number, (b_NR, scale) in enumerate(parts):
        if b_NR is not None:
            words[1 + 2 * number : 3 + 2 * number] = [b_NR.data_ptr(), b_NR.shape[1]]
            scales[number] = scale
    return words, scales


def is_aligned(
    a_RK: Tensor, parts: Sequence[tuple[Tensor | None, float]], part_rows: Sequence[int]
) -> bool:
    """Return whether the kernels may read this map's adapter 16 bytes at a time (`Tiles.aligned`).

    `part_rows`: of all parts of the map. One without an adapter moves those behind it, too.
    """
    tensors = [a_RK, *(b_NR for b_NR, _ in parts if b_NR is not None)]
    sizes = [*part_rows, *(size for tensor in tensors for size in tensor.shape)]
    return all(one.data_ptr() % 16 == 0 for one in tensors) and all(n % WIDE == 0 for n in sizes)
