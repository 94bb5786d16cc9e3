"""Pages of the KV cache on the move: copied within the GPU, or swapped to and from host memory.

    cache [groups, pages, page_size, kv_heads, C]    a group is the keys or the values of one layer

A pair (from, to) moves a page of every group, all pairs in one launch; a pair with -1 moves nothing, so the number of
pairs can be fixed for a CUDA graph. A page itself is one piece of memory; where groups and pages lie is free, so a
host cache that keeps all groups of a page together is a transposed view. Host memory must be pinned: the GPU reads
and writes it directly, with few programs, since the bus needs no more and other kernels want the rest. No page may
be read in one pair and written in another of the same call. Bytes moved: each page once in and once out.
"""

import functools
from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.arguments import INTEGERS, apart, check, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Case, Cost, Prepared, Variant
from cairn.kernels.norm.rows import blocks, launch, multiprocessors, width
from cairn.kernels.tuned import Tuning, tuned

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
    """From one cache to another, one of them in pinned host memory; `pairs` on the GPU."""
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


def _variant(block: int, warps: int) -> Variant:
    pointers = {"source": "*i32", "target": "*i32", "table": "*i64"}
    strides = ("source_group", "source_page", "target_group", "target_page")
    return Variant(
        f"move pages of 32 KiB, block {block}, {warps} warps",
        _move_kernel,
        pointers | dict.fromkeys(strides, "i64") | {"pairs": "i32"},
        {"GROUPS": 72, "WORDS": 8192, "BLOCK": block},
        {"num_warps": warps},
        [*pointers, *strides],
    )


_CANDIDATES = [{"block": b, "warps": w} for b, w in ((1024, 4), (2048, 4), (4096, 4), (8192, 8))]
VARIANTS = [_variant(WITHIN["block"], WITHIN["warps"])]
_SHAPE = (72, 512, 16, 8, 128)  # Qwen3-8B: 36 layers of keys and values


def cases() -> Iterator[Case]:
    for moves, host in ((256, False), (16, True)):
        page_bytes = 2 * _SHAPE[2] * _SHAPE[3] * _SHAPE[4]
        yield Case(
            "kv blocks to host" if host else "kv blocks copy",
            f"{moves} pages of 16 tokens, 72 groups",
            "bf16",
            cost(moves, _SHAPE[0], page_bytes),
            functools.partial(_prepare, moves, host),
        )


def _prepare(moves: int, host: bool) -> Prepared:
    cache = torch.randn(_SHAPE, device="cuda").bfloat16()
    order = torch.randperm(_SHAPE[1], device="cuda")
    pairs = torch.stack((order[:moves], order[moves : 2 * moves]), dim=1)
    far = cache
    if host:
        pairs[:, 1] = torch.arange(moves, device="cuda")
        shape = (moves, _SHAPE[0], *_SHAPE[2:])  # a page of all groups in one piece
        far = torch.empty(shape, dtype=cache.dtype, pin_memory=True).transpose(0, 1)

    def run() -> None:
        if host:
            swap_blocks(cache, far, pairs, impl="triton")
        else:
            copy_blocks(cache, pairs, impl="triton")

    def plain() -> None:
        moved = cache[:, pairs[:, 0]]
        if host:
            far.copy_(moved, non_blocking=True)
        else:
            cache[:, pairs[:, 1]] = moved

    def error() -> float:
        before = cache[:, pairs[:, 0]].clone()
        poison(far) if host else cache.index_fill_(1, pairs[:, 1], torch.nan)
        run()
        torch.cuda.synchronize()
        return relative_error(far[:, pairs[:, 1].to(far.device)].to("cuda"), before)

    return Prepared(run, {"torch": plain}, error)


def tuning() -> Iterator[Tuning]:
    within = [WITHIN | how for how in _CANDIDATES]
    across = [ACROSS | {"programs": count} for count in (16, 32, 64, 132)]
    yield Tuning("within", within, lambda: _prepare(256, False).ours)
    yield Tuning("across", across, lambda: _prepare(16, True).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
