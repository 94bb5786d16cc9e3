"""The variants of `kv_blocks` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.paged.kv_blocks import (
    ACROSS,
    WITHIN,
    _move_kernel,
    copy_blocks,
    cost,
    swap_blocks,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.paged.kv_blocks"


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
