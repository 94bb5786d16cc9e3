"""Pages of the KV cache on the move: copied within the GPU, or swapped to and from host memory.

    cache [groups, pages, page_size, kv_heads, C]    a group is the keys or the values of one layer

A pair (from, to) moves a page of every group, all pairs in one launch; a pair with -1 moves nothing, so the number of
pairs can be fixed for a CUDA graph. A page itself is one piece of memory; where groups and pages lie is free, so a
host cache that keeps all groups of a page together is a transposed view. Host memory must be pinned: the GPU reads
and writes it directly, with few programs, since the bus needs no more and other kernels want the rest. No page may
be read in one pair and written in another of the same call. Bytes moved: each page once in and once out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.arguments import INTEGERS, apart, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import blocks, launch, multiprocessors, width
from cairn.kernels.tuned import tuned

WITHIN = {"block": 2048, "warps": 4, "programs": 0}  # programs 0: eight on each multiprocessor
ACROSS = {"block": 2048, "warps": 4, "programs": 64}


def move_pages_reference(source: Tensor, target: Tensor, pairs_N2: Tensor) -> None:
    moves = [pair for pair in pairs_N2.tolist() if min(pair) >= 0]
    pages = (source.shape[1], target.shape[1])
    for pair in moves:  # all of them before the first one moves
        there = pair[0] < pages[0] and pair[1] < pages[1]
        require(there, "pairs", f"pages below {pages[0]} and {pages[1]}", tuple(pair))
    for origin, goal in moves:
        target[:, goal] = source[:, origin].to(target.device)


@triton.jit(do_not_specialize=["pairs"])
def _move_kernel(
    source, target, table, pairs, source_group, source_page, target_group, target_page,
    GROUPS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A page has WORDS words of 32 bits; consecutive programs take consecutive blocks of it."""
    pieces = GROUPS * tl.cdiv(WORDS, BLOCK)
    for item in range(tl.program_id(0), pairs * pieces, tl.num_programs(0)):
        pair = table + 2 * (item // pieces)
        origin, goal = tl.load(pair).to(tl.int64), tl.load(pair + 1).to(tl.int64)
        group = (item % pieces // tl.cdiv(WORDS, BLOCK)).to(tl.int64)
        word = item % tl.cdiv(WORDS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
        mask = (word < WORDS) & (origin >= 0) & (goal >= 0)
        from_page = source + group * source_group + origin * source_page
        to_page = target + group * target_group + goal * target_page
        tl.store(to_page + word, tl.load(from_page + word, mask=mask, other=0), mask=mask)


def copy_blocks(cache: Tensor, pairs: Tensor, impl: Impl = "auto") -> None:
    """Within a cache: page pairs[i, 0] of every group to page pairs[i, 1]."""
    _check_cache("cache", cache)
    apart("cache", cache)
    check("pairs", pairs, dtypes=INTEGERS, shape=(None, 2), beside=cache, packed=True)
    chosen = choose("kv_blocks", impl, {"triton": needs_cuda(cache), "reference": None})
    if chosen.impl == "reference":
        move_pages_reference(cache, cache, pairs)
    else:
        _launch(cache, cache, pairs, tuned("kv_blocks", "within", WITHIN), cache.device)


def swap_blocks(source: Tensor, target: Tensor, pairs: Tensor, impl: Impl = "auto") -> None:
    """Copy blocks between two caches, one of them in pinned host memory; `pairs` is on the GPU."""
    _check_cache("source", source)
    _check_cache("target", target)
    apart("target", target)
    shape = (source.shape[0], None, *source.shape[2:])
    check("target", target, dtypes=(source.dtype,), shape=shape)
    check("pairs", pairs, dtypes=INTEGERS, shape=(None, 2), packed=True)
    offers = {"triton": needs_cuda(pairs) or _unreachable(source, target), "reference": None}
    if choose("kv_blocks", impl, offers).impl == "reference":
        move_pages_reference(source, target, pairs)
    else:
        _launch(source, target, pairs, tuned("kv_blocks", "across", ACROSS), pairs.device)


def _check_cache(name: str, cache: Tensor) -> None:
    check(name, cache, shape=(None, None, None, None, None))
    heads, size = cache.shape[3:]
    packed = cache.stride()[2:] == (heads * size, size, 1)
    require(packed, name, "pages without gaps", f"strides {cache.stride()}")
    spans = (
        size * cache.element_size(),
        *(step * cache.element_size() for step in cache.stride()[:2]),
    )
    require(all(span % 4 == 0 for span in spans), name, "multiples of 4 bytes", f"steps of {spans}")


def _unreachable(*caches: Tensor) -> str | None:
    """Why the GPU cannot touch one of them, or None."""
    if needs_cuda(*caches) is None:  # all on a GPU, or in the interpreter
        return None
    off = [cache for cache in caches if cache.device.type != "cuda" and not cache.is_pinned()]
    return "host memory is not pinned" if off else None


def _launch(
    source: Tensor, target: Tensor, pairs: Tensor, how: dict[str, int], device: torch.device
) -> None:
    source, target = source.view(torch.int32), target.view(torch.int32)
    groups, words = source.shape[0], source.shape[2:].numel()
    block = min(how["block"], width(words))
    items = len(pairs) * groups * blocks(words, block)
    if not items:
        return
    programs = min(items, how["programs"] or 8 * multiprocessors(device))
    launch(
        _move_kernel, programs, source, target, pairs, len(pairs), *source.stride()[:2],
        *target.stride()[:2], GROUPS=groups, WORDS=words, BLOCK=block, num_warps=how["warps"],
    )  # fmt: skip


def cost(pairs: int, groups: int, page_bytes: int) -> Cost:
    return Cost(0, 2 * pairs * groups * page_bytes)
