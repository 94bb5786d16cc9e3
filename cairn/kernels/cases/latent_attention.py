"""The variants of `latent_attention` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention_rings import described
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.paged.latent_attention import (
    MANY_HEADS,
    Latents,
    _add_up_kernel,
    _latent_kernel,
    cost,
    latent_attention,
    latent_attention_reference,
)
from cairn.kernels.paged.latent_float8 import PLAN as FLOAT8_PLAN
from cairn.kernels.paged.latent_float8 import _float8_kernel
from cairn.kernels.paged.latent_float8 import constants as float8_constants
from cairn.kernels.paged.latent_gluon import (
    FEW_HEADS,
    GluonPlan,
    constants,
)
from cairn.kernels.paged.latent_gluon import (
    MANY_HEADS as MANY_HEADS_PLAN,
)
from cairn.kernels.paged.latent_gluon_kernel import latent_decode_kernel
from cairn.kernels.paged.latent_layout import RowLayout
from cairn.kernels.paged.latent_rows import FP8, _write_kernel, latent_write

KERNEL = "cairn.kernels.paged.latent_attention"
RANK, ROTATED, PAGE = 512, 64, 16


def _variant(
    what: str, heads: int, tile_heads: int, queries: int, parts: int, float8: bool = False
) -> Variant:
    stored = ("*fp8e4nv", "*fp32") if float8 else ("*bf16", "*bf16")
    pointers = dict(
        q="*bf16",
        cache=stored[0],
        scales=stored[1],
        keys="*bf16",
        tables="*i32",
        lengths="*i32",
        starts="*i32",
    )
    pointers |= dict(out="*fp32" if parts > 1 else "*bf16", lse="*fp32" if parts > 1 else "*bf16")
    numbers = dict(sequences="i32", tokens="i32", scale="fp32", table_stride="i32")
    numbers |= dict.fromkeys(("q_token", "q_head", "page_stride", "token_stride"), "i32")
    constants = dict(
        HEADS=heads, TILE_HEADS=tile_heads, TILE_QUERIES=queries, **RowLayout(RANK, ROTATED, float8).constants(),
        PAGE=PAGE, BLOCK=max(32, tile_heads), PARTS=parts, SEQUENCES=16, STARTS=queries > 1, EXACT=False,
    )  # fmt: skip
    aligned = (*pointers, "q_token", "q_head", "page_stride", "token_stride")
    few = tile_heads * queries <= 16 and not float8
    options = {"num_warps": 4 if few else 8, "num_stages": 1 if float8 and queries > 1 else 2}
    return Variant(
        f"latent attention {what}",
        _latent_kernel,
        pointers | numbers,
        constants,
        options,
        aligned,
        # 64 x 512 sums leave too few registers, and are still twice as fast as 16 x 512 on an H200 (633 of 1238 us).
        allowed_spills=512 if tile_heads == MANY_HEADS else 32 if float8 and queries > 1 else 0,
    )


def _gluon(what: str, heads: int, parts: int, plan: GluonPlan) -> Variant:
    types = dict(view=described([16, 64]), q="*bf16", tables="*i32", lengths="*i32")
    types |= dict(out="*fp32" if parts > 1 else "*bf16", lse="*fp32" if parts > 1 else "*bf16")
    types |= dict(tokens="i32", scale_log2="fp32", table_stride="i32", q_token="i32", q_head="i32")
    return Variant(
        f"latent decode gluon, {what}",
        latent_decode_kernel,
        types | dict(page_rows="i32"),
        constants(plan, heads, RANK, PAGE, parts),
        {"num_warps": plan.warps, "maxnreg": plan.most},
        ("q", "out", "lse", "q_token", "q_head"),
        "wgmma" if plan.tile > 16 else "mma",
        allowed_spills=96,  # of what lasts through the loop and is used once
        gluon=True,
    )


_ADDED_UP = Variant(
    "latent attention, parts added up",
    _add_up_kernel,
    dict(parts="*fp32", lse="*fp32", out="*bf16", rows="i32"),
    dict(RANK=RANK, R=RANK, PARTS=8),
    {"num_warps": 4},
    ("parts", "lse", "out", "rows"),
)


def _written(float8: bool) -> Variant:
    stored = ("*fp8e4nv", "*fp32") if float8 else ("*bf16", "*bf16")
    types = dict(rows="*bf16", slots="*i32", cache=stored[0], scales=stored[1], keys="*bf16")
    strides = dict.fromkeys(("row_stride", "page_stride", "token_stride"), "i32")
    return Variant(
        f"latent rows written{', float8' * float8}",
        _write_kernel,
        types | strides,
        {**RowLayout(RANK, ROTATED, float8).constants(), "PAGE": PAGE},
        {"num_warps": 1},
        (*types, *strides),
    )


def _by_scale(parts: int) -> Variant:
    types = dict(q="*bf16", cache="*fp8e4nv", scales="*fp32", keys="*bf16", tables="*i32")
    types |= dict(lengths="*i32", out="*fp32", lse="*fp32", tokens="i32", scale="fp32")
    strides = ("q_token", "q_head", "page_stride", "token_stride")
    types |= dict.fromkeys(("table_stride", *strides), "i32")
    return Variant(
        "latent decode, float8 by scale",
        _float8_kernel,
        types,
        float8_constants(RowLayout(RANK, ROTATED, float8=True), 16, PAGE, FLOAT8_PLAN, parts),
        {"num_warps": FLOAT8_PLAN.warps, "num_stages": FLOAT8_PLAN.stages},
        ("q", "cache", "scales", "keys", "out", "lse", *strides),
        "mma",
        allowed_spills=16,
    )


VARIANTS = [
    _variant("decode 16 heads", 16, 16, 1, 8),
    _variant("decode 128 heads", 128, MANY_HEADS, 1, 1),
    _variant("prefill 16 heads", 16, 16, 2, 1),
    _variant("decode 16 heads, float8", 16, 16, 1, 8, float8=True),
    _variant("prefill 16 heads, float8", 16, 16, 2, 1, float8=True),
    _gluon("16 heads", 16, 2, FEW_HEADS),
    _gluon("128 heads", 128, 1, MANY_HEADS_PLAN),
    _ADDED_UP,
    _by_scale(parts=4),
    _written(float8=False),
    _written(float8=True),
]


def random_call(
    sequences: int, length: int, heads: int, queries: int = 1, float8: bool = False
) -> Latents:
    """Sequences of equal length whose pages lie in random order."""
    columns = -(-length // PAGE)
    shape = (sequences * columns, PAGE, 1, RANK + ROTATED)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if float8:
        rows_NE = cache.flatten(0, 2)
        width = RowLayout(RANK, ROTATED, float8).columns
        cache = torch.zeros(*shape[:3], width, device="cuda", dtype=torch.uint8).view(FP8)
        latent_write(rows_NE, torch.arange(len(rows_NE), device="cuda"), cache, RANK)
    tables = torch.randperm(sequences * columns, device="cuda").int().view(sequences, columns)
    lengths = torch.full((sequences,), length, dtype=torch.int32, device="cuda")
    q_THE = torch.randn(
        sequences * queries, heads, RANK + ROTATED, device="cuda", dtype=torch.bfloat16
    )
    starts = torch.arange(sequences + 1, device="cuda", dtype=torch.int32) * queries
    return Latents(
        q_THE, cache, tables, lengths, starts if queries > 1 else None, queries, 192**-0.5, RANK
    )


def attended(call: Latents) -> torch.Tensor:
    return latent_attention(
        call.q_THE,
        call.cache,
        call.block_tables,
        call.lengths,
        call.starts,
        rank=call.rank,
        max_query=call.max_query,
        scale=call.scale,
    )


def _prepare(sequences: int, length: int, heads: int, float8: bool) -> Prepared:
    call = random_call(sequences, length, heads, float8=float8)

    def error() -> float:
        return relative_error((attended(call),), (latent_attention_reference(call),))

    return Prepared(lambda: attended(call), {}, error)


def cases() -> Iterator[Case]:
    for sequences, length, heads, float8 in (
        (1, 2048, 16, False),
        (64, 8192, 16, False),
        (128, 4096, 128, False),
        (64, 8192, 16, True),
    ):
        yield Case(
            "latent_attention",
            f"{sequences} x {length}, {heads} heads{', float8 rows' * float8}",
            "bf16",
            cost(sequences, length, heads, RowLayout(RANK, ROTATED, float8)),
            lambda shape=(sequences, length, heads, float8): _prepare(*shape),
            graph=True,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
