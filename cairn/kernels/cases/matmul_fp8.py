"""The variants of `matmul_fp8` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.matmul_fp8 import (
    E4M3,
    FEW,
    LARGE,
    SMALL,
    WIDE,
    _key,
    _matmul_fp8_kernel,
    _rest,
    cost,
    matmul_fp8,
    matmul_fp8_reference,
)
from cairn.kernels.matmul.matmul_fp8_blocks import matmul_fp8_blocks
from cairn.kernels.matmul.skinny_fp8 import BLOCK, row_scales
from cairn.kernels.quantize.quantize import Quantized, by_largest
from cairn.kernels.tiles import Tiles
from cairn.kernels.tuned import Tuning, shipped

KERNEL = "cairn.kernels.matmul.matmul_fp8"


CANDIDATES = [
    LARGE,
    LARGE._replace(stages=3),
    LARGE._replace(stages=3, flatten=True),
    LARGE._replace(group=16),
    LARGE._replace(block_m=256, block_n=128),
    WIDE,
    SMALL,
    Tiles(block_m=64, block_n=128, block_k=128, warps=4, stages=4, per_sm=2),
    FEW,
]


def _variant(tiles: Tiles, c: str = "bf16", per_row: int = 1) -> Variant:
    rest = _rest(tiles)
    main = tiles.block_n - rest
    types = {
        "a": f"tensordesc<fp8e4nv[{tiles.block_m}, {tiles.block_k}]>",
        "b": f"tensordesc<fp8e4nv[{main}, {tiles.block_k}]>",
        **({"b_rest": f"tensordesc<fp8e4nv[{rest}, {tiles.block_k}]>"} if rest else {}),
        "c": f"tensordesc<{c}[{tiles.block_m}, {main // 2}]>",
        **dict.fromkeys(("scale_a", "scale_b"), "*fp32"),
        **dict.fromkeys("MNK", "i32"),
    }
    constants = {**tiles.constants(), "REST": rest, "FLATTEN": tiles.flatten}
    constants |= {} if rest else {"b_rest": None}
    return Variant(
        f"matmul fp8 {tiles.name()}{'' if per_row else ', tensor-wise'} to {c}",
        _matmul_fp8_kernel,
        types,
        {**constants, "PER_ROW_A": per_row, "PER_ROW_B": per_row},
        {"num_warps": tiles.warps, "num_stages": tiles.stages},
        ("scale_a", "scale_b", "M", "N", "K"),
        "wgmma",
    )


VARIANTS = [
    *(_variant(tiles) for tiles in CANDIDATES if tiles.group == LARGE.group),
    _variant(LARGE, per_row=0),
    _variant(LARGE._replace(stages=3), c="fp32"),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("matmul_fp8"):
        if how["impl"] == "triton":
            tiles = LARGE._replace(**{name: how[name] for name in Tiles._fields if name in how})
            yield _variant(tiles, per_row=int(entry.endswith("row-wise")))


SHAPES = [(8192, 8192, 8192), (64, 24576, 4096), (256, 24576, 4096)]


def _operands(m: int, n: int, k: int, per_row: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    b_NK = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    largest = (x.float().abs().amax(-1, keepdim=True) for x in (a_MK, b_NK))
    if not per_row:
        largest = (rows.amax() for rows in largest)
    a, b = (by_largest(x.float(), top, E4M3) for x, top in zip((a_MK, b_NK), largest, strict=True))
    return a.values, b.values, a.scale, b.scale


def tuning() -> Iterator[Tuning]:
    for m, n, k in SHAPES:
        for per_row in (False, True):

            def prepare(
                m: int = m, n: int = n, k: int = k, per_row: bool = per_row
            ) -> Callable[[], Tensor]:
                operands = _operands(m, n, k, per_row)
                return lambda: matmul_fp8(*operands)

            candidates = [{**tiles._asdict(), "impl": "triton"} for tiles in CANDIDATES]
            yield Tuning(_key(m, n, k, per_row), [*candidates, {"impl": "torch"}], prepare)


def cases() -> Iterator[Case]:
    for m, n, k in SHAPES:
        for per_row in (False, True):
            scales = "row-wise" if per_row else "tensor-wise"
            name = f"matmul_fp8 {scales}"
            yield Case(
                name,
                f"{m} x {n} x {k}",
                "fp8",
                cost(m, n, k),
                lambda s=(m, n, k, per_row): _prepare(*s),
                graph=m <= 256,
            )
    m, n, k = SHAPES[0]
    shape = f"{m} x {n} x {k}"
    yield Case("matmul_fp8 blocks", shape, "fp8", cost(m, n, k), lambda: _prepare_blocks(m, n, k))


def _prepare_blocks(m: int, n: int, k: int) -> Prepared:
    a, b, scale_a, _ = _operands(m, n, k, True)
    scales = torch.rand(n // BLOCK, k // BLOCK, device="cuda") + 0.5
    x, w = Quantized(a, scale_a), Quantized(b, scales)

    def error() -> float:
        rows = slice(None, None, max(1, m // 256))
        wide_NK = b.double() * row_scales(w).double()
        exact = (a[rows].double() * scale_a[rows].double()) @ wide_NK.T
        return relative_error(matmul_fp8_blocks(x, w)[rows], exact)

    return Prepared(lambda: matmul_fp8_blocks(x, w), {}, error)


def _prepare(m: int, n: int, k: int, per_row: bool) -> Prepared:
    operands = _operands(m, n, k, per_row)
    y_MN = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def error() -> float:
        poison(y_MN)
        matmul_fp8(*operands, out=y_MN, impl="triton")
        rows = slice(None, None, max(1, m // 1024))  # an eighth of the rows is enough for the truth
        a, b, scale_a, scale_b = operands
        scale_a = scale_a[rows] if per_row else scale_a
        exact = matmul_fp8_reference(a[rows], b, scale_a, scale_b, torch.float64, torch.float64)
        return relative_error(y_MN[rows], exact)

    return Prepared(
        lambda: matmul_fp8(*operands, out=y_MN, impl="triton"),
        {"torch._scaled_mm": lambda: matmul_fp8(*operands, out=y_MN, impl="torch")},
        error,
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
