"""Inputs of the adapter kernels: the table of all adapters on the device, and the adapter of each row.

    rows sorted by adapter   | slot 0 | slot 3 .......... | slot 7 |        tiles of at most `block` rows of one slot

A slot of the table holds addresses, ranks and scales, so adapters stay where they were loaded, each with its own rank,
and loading one changes no launch: the kernels can lie in a CUDA graph. Slot 0 has no adapter. A map has up to three
parts (q, k, v) with one A each, stacked, and one B each.

Where the matrices A of a step lie as rows behind the weight of their map, the product of the base computes A x, too:
its columns behind those of the map belong to positions, each as wide as the largest adapter, and a tile has the one of
its slot.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

PARTS = 3
# Words of a slot for one map: the address of A; of each part the address of B and its rank; one is unused.
ENTRY = 8
NO_TILE = -1
TILE = 4  # words of a tile
FEW_TOKENS = 512  # steps up to here have small tiles, and cut K to fill the chip
SMALL_TILE, LARGE_TILE = 16, 64
WIDE = 8  # ranks and widths that are multiples of it are read 16 bytes at a time
NUMBERS = ("map_number", "maps")  # one kernel for all maps and models, whatever these are


class LoraTable(NamedTuple):
    """Every adapter on the device, for every map."""

    entries_SME: Tensor  # int64 [slots, maps, ENTRY]
    scales_SMP: Tensor  # float32 [slots, maps, PARTS]


class Tiles(NamedTuple):
    """Rows of a step by adapter slot."""

    rows_T: Tensor  # int32, all rows, sorted by slot
    tiles_N4: Tensor  # int32 [tiles, TILE]: slot or NO_TILE, first and end in rows_T, position
    block: int  # rows of a tile at most
    # All ranks and widths are multiples of 8 and all adapters begin at multiples of 16 bytes: reads are wide.
    aligned: bool = False
    positions: int = 0  # that a product has columns for; 0: A x is computed apart


class Widest(NamedTuple):
    """The largest ranks of one map in any slot."""

    together: int  # of all its parts
    part: int  # of one of them


def tile_block(tokens: int) -> int:
    return SMALL_TILE if tokens <= FEW_TOKENS else LARGE_TILE


@triton.jit
def read_slot(tiles, tile):
    return tl.load(tiles + 4 * tile, eviction_policy="evict_last")


@triton.jit
def read_position(tiles, tile):
    return tl.load(tiles + 4 * tile + 3, eviction_policy="evict_last")


@triton.jit
def read_tile(tiles, rows, tile, BLOCK_M: tl.constexpr):
    """Places of the tile's rows in the sorted order, which of them exist, and the rows themselves.

    Tables are read in every kernel of a step and are small: they stay in the cache while weights pass through it.
    """
    first = tl.load(tiles + 4 * tile + 1, eviction_policy="evict_last")
    end = tl.load(tiles + 4 * tile + 2, eviction_policy="evict_last")
    place = first + tl.arange(0, BLOCK_M)
    inside = place < end
    row = tl.load(rows + place, mask=inside, other=0, eviction_policy="evict_last").to(tl.int64)
    return place, inside, row


@triton.jit
def multiple_of_eight(value, ALIGNED: tl.constexpr):
    """The same number, of which the compiler knows that it is a multiple of 8, where it is."""
    return value // 8 * 8 if ALIGNED else value


@triton.jit
def read_rank(entry, PART: tl.constexpr, ALIGNED: tl.constexpr):
    rank = tl.load(entry + 2 + 2 * PART, eviction_policy="evict_last").to(tl.int32)
    return multiple_of_eight(rank, ALIGNED)


@triton.jit
def read_address(entry, like, ALIGNED: tl.constexpr):
    address = tl.load(entry, eviction_policy="evict_last").to(
        tl.pointer_type(like.dtype.element_ty)
    )
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address
