"""y = (a * scale_a) @ (b * scale_b).T of float8 e4m3 operands: twice the rate of bfloat16, half the bytes.

    a [M, K], b [N, K] (as nn.Linear keeps it), y [M, N] bfloat16, float16 or float32
    a scale is one float32 for the whole operand, or one per row of it (per token, per output channel)

How precise are the sums? A Hopper tensor core adds fp8 products in a register of about 14 significant bits
(arXiv:2412.19437, 3.3.2). Sums stay there for all of K, as with cuBLAS's fast accumulation: fine for inference.
Bytes moved: M*K + N*K read, 2*M*N written (16-bit y). K counts zeros beyond its end, so no size needs padding; rows
must start at multiples of 16 bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.kernel import Cost
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.tiles import Tiles, place, row_bucket, row_tiles, tma_obstacle
from cairn.kernels.tuned import tuned

E4M3 = torch.float8_e4m3fn


def matmul_fp8_reference(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    wide: torch.dtype = torch.float32,
) -> Tensor:
    a = a_MK.to(wide) * scale_a.reshape(-1, 1).to(wide)
    return (a @ (b_NK.to(wide) * scale_b.reshape(-1, 1).to(wide)).T).to(dtype)


@triton.jit
def _scales(scale, first, limit, WIDTH: tl.constexpr, PER_ROW: tl.constexpr):
    """WIDTH of the rows' scales, or the one of all of them."""
    at = first + tl.arange(0, WIDTH)
    return tl.load(scale + at * PER_ROW, mask=at < limit, other=0.0)


@triton.jit
def _matmul_fp8_kernel(
    a, b, b_rest, c, scale_a, scale_b, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, REST: tl.constexpr, GROUP: tl.constexpr,
    PER_ROW_A: tl.constexpr, PER_ROW_B: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """A tile is BN columns wide. The last REST of them are a product of their own where BN is no power of two."""
    MAIN: tl.constexpr = BN - REST
    HALF: tl.constexpr = MAIN // 2
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = place(tile, M, N, BM, BN, GROUP)
        y = tl.zeros([BM, MAIN], tl.float32)
        z = tl.zeros([BM, REST if REST > 0 else 1], tl.float32)
        for k in range(0, K, BK):
            values = a.load([row, k])
            y = tl.dot(values, b.load([column, k]).T, y)
            if REST > 0:
                z = tl.dot(values, b_rest.load([column + MAIN, k]).T, z)
        scales = _scales(scale_a, row, M, BM, PER_ROW_A)[:, None]
        y = y * scales
        # Two halves one after the other need half the shared memory on the way out.
        left, right = tl.split(tl.permute(tl.reshape(y, (BM, 2, HALF)), (0, 2, 1)))
        left *= _scales(scale_b, column, N, HALF, PER_ROW_B)[None, :]
        c.store([row, column], left.to(c.dtype))
        right *= _scales(scale_b, column + HALF, N, HALF, PER_ROW_B)[None, :]
        c.store([row, column + HALF], right.to(c.dtype))
        if REST > 0:
            z = z * scales * _scales(scale_b, column + MAIN, N, REST, PER_ROW_B)[None, :]
            c.store([row, column + MAIN], z.to(c.dtype))


def matmul_fp8(
    a_MK: Tensor,
    b_NK: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """(a * scale_a) @ (b * scale_b).T; see the head of this file for the scales."""
    check("a_MK", a_MK, dtypes=(E4M3,))
    a = as_rows("a_MK", a_MK)
    check("b_NK", b_NK, dtypes=(E4M3,), shape=(None, a.shape[1]), beside=a)
    m, n = a.shape[0], b_NK.shape[0]
    scale_a = _scale("scale_a", scale_a, m, a)
    scale_b = _scale("scale_b", scale_b, n, a)
    require(out_dtype in FLOATS, "out_dtype", "float32, bfloat16 or float16", out_dtype)
    y = output("out", out, (*a_MK.shape[:-1], n), out_dtype, a)
    tiles, wins = _config(m, n, a.shape[1], scale_a.numel() > 1 or scale_b.numel() > 1)
    offers = {
        "triton": _triton_obstacle(a, b_NK, y),
        "torch": _torch_obstacle(a, b_NK, out_dtype, scale_a.numel() + scale_b.numel() > 2),
        "reference": None,
    }
    if wins == "torch":
        offers = {"torch": offers.pop("torch"), **offers}
    how = choose("matmul_fp8", impl, offers).impl
    if y.numel() == 0:
        return y
    flat = as_rows("out", y)
    if how == "triton":
        launch(a, b_NK, flat, scale_a, scale_b, tiles)
    elif how == "torch":
        _by_torch(a, b_NK, flat, scale_a, scale_b)
    else:
        flat.copy_(matmul_fp8_reference(a, b_NK, scale_a, scale_b, out_dtype))
    return y


def _scale(name: str, scale: Tensor, rows: int, beside: Tensor) -> Tensor:
    """A flat tensor of scales: one, or one for each row."""
    check(name, scale, dtypes=(torch.float32,), beside=beside, packed=True)
    fits = scale.numel() in (1, rows)
    require(fits, name, f"1 or {rows} numbers", f"shape {list(scale.shape)}")
    return scale.reshape(-1)


def _triton_obstacle(a: Tensor, b: Tensor, y: Tensor) -> str | None:
    for name, tensor in {"a_MK": a, "b_NK": b, "out": y}.items():
        if (reason := tma_obstacle(name, tensor)) is not None:
            return reason
    return needs_cuda(a, b, y) or (needs_hopper(a) if a.is_cuda else None)


def _torch_obstacle(a: Tensor, b: Tensor, dtype: torch.dtype, per_row: bool) -> str | None:
    if not a.is_cuda:
        return f"cuBLAS is not on {a.device}"
    if a.shape[1] % 16 or b.shape[0] % 16:
        return "cuBLAS wants N and K to be multiples of 16 in fp8"
    if per_row and dtype != torch.bfloat16:
        return "with scales per row cuBLAS writes bfloat16 only"
    return None


def _by_torch(a: Tensor, b: Tensor, y: Tensor, scale_a: Tensor, scale_b: Tensor) -> None:
    if scale_a.numel() > 1 or scale_b.numel() > 1:  # both per row, or neither
        scale_a = scale_a.expand(a.shape[0]).contiguous()[:, None]
        scale_b = scale_b.expand(b.shape[0]).contiguous()[None, :]
    torch._scaled_mm(a, b.T, scale_a, scale_b, out_dtype=y.dtype, use_fast_accum=True, out=y)


LARGE = Tiles(block_k=128, stages=4)
SMALL = Tiles(block_n=128, block_k=128, warps=4, stages=4)
# As few columns as leave no multiprocessor idle where 256 rows meet tens of thousands of columns; 128 + 64 of them.
WIDE = Tiles(block_m=256, block_n=192, block_k=128, stages=3)
FEW = Tiles(block_m=64, block_n=64, block_k=128, warps=4, stages=4, per_sm=3)


def _key(m: int, n: int, k: int, per_row: bool) -> str:
    scales = "row-wise" if per_row else "tensor-wise"
    return f"m={row_bucket(m)},n={n},k={k},{scales}"


def _config(m: int, n: int, k: int, per_row: bool) -> tuple[Tiles, str]:
    """Tiles and the faster implementation, "triton" or "torch"."""
    fits = 128 < m <= 256 and 120 <= WIDE.number(m, n) <= 132
    large = WIDE if fits else LARGE
    few = (
        large is not WIDE and large.number(m, n) < 132
    )  # large tiles would leave multiprocessors without work
    tiles = FEW if m <= 64 else SMALL if few else large
    default = {**tiles._asdict(), "impl": "triton" if m <= 64 and per_row else "torch"}
    found = tuned("matmul_fp8", _key(m, n, k, per_row), default)
    return Tiles(**{name: found[name] for name in Tiles._fields}), str(found["impl"])


def _rest(tiles: Tiles) -> int:
    """Columns beyond the largest power of two in a tile; a half of that one, or none."""
    return tiles.block_n - (1 << tiles.block_n.bit_length() - 1)


def launch(
    a: Tensor,
    b: Tensor,
    y: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    tiles: Tiles,
) -> None:
    """Run the kernel on checked two-dimensional operands."""
    (m, k), n = a.shape, b.shape[0]
    wide = y.element_size() > 2  # the way out takes the shared memory of a stage
    rest = _rest(tiles)
    main = tiles.block_n - rest
    kernel: Any = _matmul_fp8_kernel
    kernel[(tiles.programs(m, n, multiprocessors(a.device)),)](
        row_tiles(a, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(b, [main, tiles.block_k]),
        TensorDescriptor.from_tensor(b, [rest, tiles.block_k]) if rest else None,
        TensorDescriptor.from_tensor(y, [tiles.block_m, main // 2]),
        *(scale_a, scale_b, m, n, k),
        **tiles.constants(),
        REST=rest,
        PER_ROW_A=int(scale_a.numel() > 1),
        PER_ROW_B=int(scale_b.numel() > 1),
        FLATTEN=tiles.flatten,
        num_warps=tiles.warps,
        num_stages=min(tiles.stages, 2 if rest else 3) if wide else tiles.stages,
    )


def cost(m: int, n: int, k: int) -> Cost:
    """Cost with 16-bit results; the scales are negligible."""
    return Cost(2.0 * m * n * k, m * k + n * k + 2.0 * m * n)
