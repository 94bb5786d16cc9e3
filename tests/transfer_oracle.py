"""KV hand-over by brute force: numpy arrays shaped like the pools, one token and one head at a time.

Shares no arithmetic with the planner: a pool is a real n-dimensional array here, and addresses are numpy's business.
"""

from typing import Any

import numpy as np

from cairn.comm.transfer.kv import KVContents, KVLayout

# Whole numbers of the right width stand for the floats: bytes are bytes.
STAND_INS = {4: np.uint32, 2: np.uint16, 1: np.uint8}


def whole_cache(contents: KVContents, tokens: int, seed: int = 0) -> np.ndarray:
    """[layer, plane, token, head, column], random."""
    shape = (contents.layers, contents.planes, tokens, contents.kv_heads, contents.width)
    kind = STAND_INS[contents.itemsize]
    return np.random.default_rng(seed).integers(0, np.iinfo(kind).max, shape, dtype=kind)


def pool_view(layout: KVLayout, rank: int, memory: np.ndarray) -> np.ndarray:
    """A rank's bytes as [layer, plane, page, token, head, column]."""
    contents = layout.contents
    first, last = layout.layers(rank)
    layers, heads = last - first, len(heads_of(layout, rank))
    inside = layout.page_size * heads * contents.width * contents.itemsize
    row = inside + layout.page_gap_bytes
    if layout.page_outermost:
        rows = memory.reshape(layout.pages, layers, contents.planes, row).transpose(1, 2, 0, 3)
    else:
        rows = memory.reshape(layers, contents.planes, layout.pages, row)
    numbers = rows[..., :inside].view(STAND_INS[contents.itemsize])
    if layout.heads_first:
        shape = (*numbers.shape[:3], heads, layout.page_size, contents.width)
        return numbers.reshape(shape).swapaxes(3, 4)
    return numbers.reshape(*numbers.shape[:3], layout.page_size, heads, contents.width)


def heads_of(layout: KVLayout, rank: int) -> list[int]:
    """Counted out head by head: rank t holds head h if t * heads // tp says so, or h's share of ranks does."""
    contents, tp = layout.contents, layout.tp
    if contents.latent:
        return [0]
    place, heads = rank % tp, contents.kv_heads
    if tp <= heads:
        return [head for head in range(heads) if head // (heads // tp) == place]
    return [place // (tp // heads)]


def garbage(layout: KVLayout, seed: int) -> list[np.ndarray]:
    """Memory of every rank, full of what was there before."""
    rng = np.random.default_rng(seed)
    sizes = [layout.region_bytes(rank) for rank in range(layout.ranks)]
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def store(
    layout: KVLayout,
    memories: list[np.ndarray],
    table: Any,
    whole: np.ndarray,
    tokens: tuple[int, int],
    layers: tuple[int, int] | None = None,
) -> None:
    """Write tokens of the whole into the pages of every rank that holds them."""
    chosen = range(*(layers or (0, layout.contents.layers)))
    for rank, memory in enumerate(memories):
        first, last = layout.layers(rank)
        pool = pool_view(layout, rank, memory)
        for token in range(*tokens):
            page, place = table[token // layout.page_size], token % layout.page_size
            for layer in range(first, last):
                if layer not in chosen:
                    continue
                for local, head in enumerate(heads_of(layout, rank)):
                    pool[layer - first, :, page, place, local] = whole[layer, :, token, head]
