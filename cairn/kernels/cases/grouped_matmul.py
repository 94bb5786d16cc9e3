"""The variants of `grouped_matmul` that are compiled and the shapes at which it is measured and tuned.

Tokens choose uniformly, as random weights do, and by Zipf's law, as trained routers may: `(zipf)`.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention_rings import AVERAGE_REGISTERS, described
from cairn.kernels.experts import few_mxfp4, grouped_ring
from cairn.kernels.experts.grouped_kernel import _grouped_kernel
from cairn.kernels.experts.grouped_large import LargeTiles, _large_kernel
from cairn.kernels.experts.grouped_large import constants as large_constants
from cairn.kernels.experts.grouped_matmul import (
    FEW,
    FP8_FEW,
    FP8_MANY,
    LARGE,
    LARGE_FP8,
    MANY,
    MORE,
    MXFP4_FEW,
    MXFP4_MANY,
    SINGLE,
    SOME,
    SWIGLU,
    Gating,
    GroupTiles,
    _key,
    constants,
    cost,
    grouped_matmul,
    grouped_matmul_reference,
    grouped_parts,
    grouped_parts_reference,
)
from cairn.kernels.experts.grouped_ring_kernel import ROWS, STAGED, ring_kernel, row_tiles_kernel
from cairn.kernels.experts.matrices import TILE
from cairn.kernels.experts.sort_pairs import FEW_PAIRS, FewPairs, Pairs, sort_pairs
from cairn.kernels.kernel import Case, Cost, Prepared, Variant
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.experts.grouped_matmul"


class Shape(NamedTuple):
    name: str
    n: int
    k: int
    swiglu: bool

    @property
    def gating(self) -> Gating | None:
        return SWIGLU if self.swiglu else None


# Qwen3-30B-A3B: 128 experts, 8 for each token.
COUNT, PER_TOKEN = 128, 8
OSS_GATE_UP = Shape("gate_up gpt-oss", 5760, 2880, True)
OSS_DOWN = Shape("down gpt-oss", 2880, 2880, False)
GATE_UP, DOWN = Shape("gate_up", 1536, 2048, True), Shape("down", 2048, 768, False)

CANDIDATES = {
    16: [SINGLE, FEW, *(GroupTiles(16, n, k, w, s) for n, k, w, s in (
        (32, 128, 4, 4), (32, 256, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6), (128, 64, 4, 4),
        (128, 128, 8, 3), (32, 128, 2, 5), (64, 256, 4, 3), (16, 256, 1, 4), (32, 128, 2, 4), (64, 128, 2, 3),
    ))],
    32: [SOME, *(GroupTiles(32, n, k, w, s) for n, k, w, s in (
        (64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (128, 128, 8, 3),
    ))],
    64: [MORE, GroupTiles(64, 64, 128, 4, 3), GroupTiles(64, 128, 64, 4, 3), GroupTiles(64, 128, 64, 8, 4),
         GroupTiles(64, 256, 64, 8, 3)],
    128: [MANY, GroupTiles(128, 128, 64, 8, 3), GroupTiles(128, 64, 64, 4, 4), GroupTiles(128, 256, 64, 8, 3)],
}  # fmt: skip


Kind = Literal["bf16", "fp8", "mxfp4"]


def _variant(
    tiles: GroupTiles,
    shape: Shape,
    parts: bool = False,
    kind: Kind = "bf16",
    gating: Gating | None = None,
    per_token: int = PER_TOKEN,
) -> Variant:
    stored, across = {"bf16": ("bf16", 1), "fp8": ("fp8e4nv", 1), "mxfp4": ("u8", 2)}[kind]
    types: dict[str, str] = {
        "x": "*fp8e4nv" if kind == "fp8" else "*bf16",
        "w": f"tensordesc<{stored}[{tiles.block_n}, {tiles.block_k // across}]>",
        "y": "*fp32" if parts else "*bf16",
        "order": "*i32",
        "ends": "*i32",
        **dict.fromkeys(("stride_x", "tokens", "N", "K"), "i32"),
        "limit": "fp32",
    }
    types |= {"fp8": {"x_scales": "*fp32", "w_scales": "*fp32"}, "mxfp4": {"w_scales": "*u8"}}.get(
        kind, {}
    )
    types |= {"bias": "*bf16"} if gating else {}
    chosen = gating or shape.gating
    packed = kind == "mxfp4"
    fixed: dict[str, Any] = {
        **constants(tiles, COUNT, per_token, shape.k, shape.swiglu, chosen, packed),
        **{name: None for name in ("x_scales", "w_scales", "bias") if name not in types},
        "OVERLAP": True,
    }
    if parts:
        types["weights"] = "*fp32"
    else:
        fixed["weights"] = None
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    aligned = tuple(name for name in types if name not in ("w", "tokens", "limit"))
    marks = [kind] * (kind != "bf16") + ["parts"] * parts
    name = ", ".join((f"grouped {shape.name} {tiles.name()}", *marks))
    tall = tiles.block_n if kind == "mxfp4" else max(tiles.block_m, tiles.block_n)
    expect = "wgmma" if tall >= 64 and tiles.warps >= 4 else "mma"
    return Variant(name, _grouped_kernel, types, fixed, options, aligned, expect)


def _large_variant(tiles: LargeTiles, shape: Shape, kind: Kind = "bf16") -> Variant:
    stored = {"bf16": "bf16", "fp8": "fp8e4nv"}[kind]
    types = {
        "x": f"tensordesc<{stored}[{tiles.block_m}, {tiles.block_k}]>",
        "w": f"tensordesc<{stored}[{tiles.block_n}, {tiles.block_k}]>",
        "y": "*bf16",
        "ends": "*i32",
        "N": "i32",
        "K": "i32",
    }
    scales = ("x_scales", "w_scales")
    types |= dict.fromkeys(scales, "*fp32") if kind == "fp8" else {}
    fixed: dict[str, Any] = {**large_constants(tiles, COUNT), "OVERLAP": True}
    fixed |= {name: None for name in scales if name not in types}
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    marks = [kind] * (kind != "bf16")
    name = ", ".join((f"grouped {shape.name} persistent {tiles.name()}", *marks))
    aligned = tuple(name for name in types if name not in ("x", "w"))
    return Variant(name, _large_kernel, types, fixed, options, aligned, "wgmma")


def _ring_variant(shape: Shape) -> Variant:
    kind, gather = torch.float8_e4m3fn, shape.swiglu
    wide = grouped_ring.STAGE_BYTES // kind.itemsize
    types = dict(
        x="*fp8e4nv",
        x_desc=described([ROWS.value, wide], kind),
        w_desc=described([STAGED.value, wide], kind),
        y="*bf16",
        **dict.fromkeys(("order", "tiles"), "*i32"),
        **dict.fromkeys(("x_scales", "w_scales"), "*fp32"),
        **dict.fromkeys(("N", "stride_x"), "i32"),
    )
    plan = grouped_ring.GATHERED if gather else grouped_ring.IN_ORDER
    size = (shape.n, shape.k, PER_TOKEN)
    return Variant(
        f"grouped {shape.name} ring, fp8",
        ring_kernel,
        types,
        grouped_ring.constants(kind, *size, gather, shape.swiglu, plan),
        {"num_warps": 4, "maxnreg": AVERAGE_REGISTERS},
        [name for name in types if not name.endswith("desc")],
        "wgmma",
        gluon=True,
        allowed_spills=16,  # of what is used once in a tile
    )


_ROW_TILES = Variant(
    "list of row tiles",
    row_tiles_kernel,
    dict(ends="*i32", tiles="*i32"),
    {**grouped_ring.tile_constants(COUNT), "OVERLAP": True},
    {"num_warps": 4},
    ("ends", "tiles"),
)


def _few_variant(tiles: few_mxfp4.FewTiles, shape: Shape) -> Variant:
    """Compiled variant for a single token of gpt-oss."""
    parts = not shape.swiglu
    types = dict(
        x="*i64",
        w="*i32",
        scales="*u8",
        y="*fp32" if parts else "*bf16",
        experts="*i32",
        bias="*bf16",
        **dict.fromkeys(("stride_x", "tokens", "N", "QUARTER"), "i32"),
        limit="fp32",
        **({"weights": "*fp32"} if parts else {}),
    )
    words = -(-shape.k // TILE) * few_mxfp4.TILE_WORDS.value
    limit = 7.0 if shape.swiglu else None
    fixed = {
        **few_mxfp4.constants(32, 4, words, shape.swiglu, limit, tiles),
        "OVERLAP": True,
        **({} if parts else {"weights": None}),
    }
    aligned = tuple(name for name in types if name not in ("tokens", "limit", "QUARTER"))
    name = f"few mxfp4 {shape.name} {tiles.rows} rows, {tiles.warps} warps"
    return Variant(name, few_mxfp4._few_kernel, types, fixed, {"num_warps": tiles.warps}, aligned)


VARIANTS = [
    *(_variant(tiles, GATE_UP) for tiles in (SINGLE, FEW, SOME, MORE, MANY)),
    *(_variant(tiles, DOWN, parts=True) for tiles in (FEW, SOME, MORE)),
    _variant(MANY, DOWN),
    *(_variant(tiles, GATE_UP, kind="fp8") for tiles in (FP8_FEW, FP8_MANY)),
    _variant(FP8_FEW, DOWN, parts=True, kind="fp8"),
    *(
        _variant(tiles, OSS_GATE_UP, kind="mxfp4", gating=Gating(7.0), per_token=4)
        for tiles in (MXFP4_FEW, MXFP4_MANY)
    ),
    _variant(MXFP4_FEW, OSS_DOWN, parts=True, kind="mxfp4", per_token=4),
    _few_variant(few_mxfp4.GATED, OSS_GATE_UP),
    _few_variant(few_mxfp4.PLAIN, OSS_DOWN),
    _large_variant(LARGE, DOWN),
    _large_variant(LARGE_FP8, DOWN, "fp8"),
    _ring_variant(GATE_UP),
    _ring_variant(DOWN),
    _ROW_TILES,
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("grouped_matmul"):
        numbers, swiglu = numbers_of(entry), "swiglu" in entry
        shape = Shape("gate_up" if swiglu else "down", numbers["n"], numbers["k"], swiglu)
        yield _variant(GroupTiles(**how), shape, parts=not swiglu and numbers["pairs"] <= 4096)


def choices(tokens: int, zipf: bool = False) -> Tensor:
    """Experts [T, k] int32, without doubles in a row."""
    weights_E = torch.ones(COUNT)
    if zipf:
        weights_E = 1.0 / torch.arange(1, COUNT + 1)
    generator = torch.Generator().manual_seed(0)
    chosen_TK = torch.multinomial(weights_E.expand(tokens, COUNT), PER_TOKEN, generator=generator)
    return chosen_TK.int()


def _operands(shape: Shape, tokens: int, zipf: bool) -> tuple[Tensor, Tensor, Pairs]:
    pairs = sort_pairs(choices(tokens, zipf).cuda(), COUNT)
    rows = tokens if shape.swiglu else tokens * PER_TOKEN
    x = torch.randn(rows, shape.k, device="cuda").to(torch.bfloat16)
    w_ENK = torch.randn(COUNT, shape.n, shape.k, device="cuda", dtype=torch.bfloat16)
    return x, w_ENK.mul_(shape.k**-0.5), pairs


def candidates(shape: Shape, tokens: int) -> list[GroupTiles]:
    each = tokens * PER_TOKEN // COUNT
    sizes = [m for m in CANDIDATES if m <= max(16, 8 * each) and m * 8 >= each]
    fitting = [tiles for m in sizes for tiles in CANDIDATES[m]]
    # Three stages of two such tiles of w do not fit into shared memory.
    return [t for t in fitting if not (shape.swiglu and t.block_m * t.block_n > 128 * 128)]


def tuning() -> Iterator[Tuning]:
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192):
        for shape in (GATE_UP, DOWN):

            def prepare(tokens: int = tokens, shape: Shape = shape) -> Callable[[], Tensor]:
                x, w_ENK, pairs = _operands(shape, tokens, zipf=False)
                return lambda: grouped_matmul(
                    x, w_ENK, pairs, gather=shape.swiglu, gating=shape.gating
                )

            tiles = [tiles._asdict() for tiles in candidates(shape, tokens)]
            w_shape = torch.empty(COUNT, shape.n, shape.k, device="meta")
            yield Tuning(_key(tokens * PER_TOKEN, w_shape, shape.swiglu), tiles, prepare)


def cases() -> Iterator[Case]:
    for tokens in (1, 8, 32, 128, 512, 8192):
        for zipf in (False, True):
            for shape in (GATE_UP, DOWN):
                active = len(choices(tokens, zipf).unique())
                work = cost(tokens * PER_TOKEN, active, shape.n, shape.k, swiglu=shape.swiglu)
                name = f"{shape.name}, {tokens} tokens{' (zipf)' if zipf else ''}"
                given = (shape, tokens, zipf)
                yield Case("grouped_matmul", name, "bf16", work, lambda g=given: _prepare(*g),
                           graph=tokens <= 512)  # fmt: skip
    for tokens in (1, 8, 32, 128):
        for zipf in (False, True):
            active = len(choices(tokens, zipf).unique())
            parts = [
                cost(tokens * PER_TOKEN, active, shape.n, shape.k, swiglu=shape.swiglu)
                for shape in (GATE_UP, DOWN)
            ]
            work = Cost(sum(part.flops for part in parts), sum(part.bytes for part in parts))
            name = f"layer behind its router, {tokens} tokens{' (zipf)' if zipf else ''}"
            yield Case("grouped_matmul", name, "bf16", work,
                       lambda g=(tokens, zipf): _prepare_layer(*g), graph=True)  # fmt: skip


def _prepare(shape: Shape, tokens: int, zipf: bool) -> Prepared:
    x, w_ENK, pairs = _operands(shape, tokens, zipf)
    weights_TK = torch.rand(tokens, PER_TOKEN, device="cuda")

    def ours() -> Tensor:
        if shape.swiglu:
            return grouped_matmul(x, w_ENK, pairs, gather=True, gating=SWIGLU, impl="triton")
        if tokens <= 512:
            return grouped_parts(x, w_ENK, pairs, weights_TK, impl="triton")
        return grouped_matmul(x, w_ENK, pairs, impl="triton")

    def by_torch() -> Tensor:
        rows_PK = x[pairs.order_P // PER_TOKEN] if shape.swiglu else x
        y_PN = torch.nn.functional.grouped_mm(rows_PK, w_ENK.transpose(1, 2), offs=pairs.ends_E)
        if not shape.swiglu:
            return y_PN
        gate, up = y_PN.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def error() -> float:
        exact = grouped_matmul_reference(
            x.float(), w_ENK, pairs, gather=shape.swiglu, gating=shape.gating
        )
        found = grouped_matmul(
            x, w_ENK, pairs, gather=shape.swiglu, gating=shape.gating, impl="triton"
        )
        return relative_error(found, exact)

    return Prepared(ours, {"torch.grouped_mm": by_torch}, error)


def _prepare_layer(tokens: int, zipf: bool) -> Prepared:
    """Case of serving with few tokens: pairs are sorted, and both matmuls leave partial sums for the next norm."""
    x, inner_ENK, _ = _operands(GATE_UP, tokens, zipf)
    down_ENK = _operands(DOWN, tokens, zipf)[1]
    chosen_TK, weights_TK = choices(tokens, zipf).cuda(), torch.rand(tokens, PER_TOKEN).cuda()

    def layer() -> Tensor:
        few = tokens * PER_TOKEN <= FEW_PAIRS
        pairs = FewPairs(chosen_TK.flatten(), PER_TOKEN) if few else sort_pairs(chosen_TK, COUNT)
        inner = grouped_matmul(x, inner_ENK, pairs, gather=True, gating=SWIGLU, impl="triton")
        return grouped_parts(inner, down_ENK, pairs, weights_TK, impl="triton")

    def error() -> float:
        pairs = sort_pairs(chosen_TK, COUNT)
        inner = grouped_matmul_reference(x.float(), inner_ENK, pairs, gather=True, gating=SWIGLU)
        return relative_error(layer(), grouped_parts_reference(inner, down_ENK, pairs, weights_TK))

    return Prepared(layer, {}, error)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
