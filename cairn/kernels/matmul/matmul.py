"""y = a @ b.T, with what follows a linear layer done before y leaves the chip.

    a [M, K], b [N, K] (as nn.Linear keeps it)  ->  + bias  ->  SwiGLU or GELU  ->  + residual  ->  / scale  ->  y

With SwiGLU the first half of b's rows is the gate and the second half is up: y = silu(a @ gate.T) * (a @ up.T),
[M, N / 2]. With a scale y becomes float8 e4m3: clamp(y / scale). Products are summed in float32 and rounded once.
Bytes moved: M*K + N*K read, M*N written; the epilogues add what they read and spare a round trip of y each.

The kernel keeps one program per multiprocessor, which walks over tiles of y in an order that shares rows of b in
the L2 cache, and moves tiles with TMA: rows must start at multiples of 16 bytes. Without an epilogue cuBLAS is as
fast or faster and stays the default; it also has the only backward. Products of a few rows are bound by the bytes
of b and have a kernel of their own (skinny_matmul).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.arguments import FLOATS, as_rows, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.kernel import Cost
from cairn.kernels.layer.activation_backward import power_of_two, reciprocal
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference, with_epilogue
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.quantize.quantize import fp8_scaled
from cairn.kernels.tiles import Tiles, place, row_bucket, row_tiles, tma_obstacle
from cairn.kernels.tuned import tuned


@triton.jit
def _finish(y, row, column, c, residual, out_scale):
    """Residual, quantisation and the store of a tile of results."""
    if residual is not None:
        y += residual.load([row, column]).to(tl.float32)
    if out_scale is not None:
        c.store([row, column], fp8_scaled(y, 1.0 / tl.load(out_scale)))
    else:
        c.store([row, column], y.to(c.dtype))


@triton.jit
def _add_bias(y, bias, column, N, WIDTH: tl.constexpr):
    at = column + tl.arange(0, WIDTH)
    return y + tl.load(bias + at, mask=at < N, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _gelu(x):
    """x times the logistic function of an odd polynomial: within 3e-5 of the exact GELU.

    A fifth power is enough for results of 16 bits, and is cheaper than the error function. Beyond |x| = 8 the argument
    grows with x alone, so that the share stays 0 or 1.
    """
    square = tl.minimum(x * x, 64.0)
    z = x * (1.595015729 + square * (0.0740113255 - 0.0007030387 * square))
    return x * reciprocal(1.0 + power_of_two(z * -1.4426950408889634))


@triton.jit
def _matmul_kernel(
    a, b, c, bias, residual, out_scale, M, N, K,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    SWIGLU: tl.constexpr, GELU: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """y [M, N]. With SwiGLU b has 2 * N rows, and a tile of y needs a tile of gate and one of up, each BN / 2 wide."""
    HALF: tl.constexpr = BN // 2
    WIDTH: tl.constexpr = HALF if SWIGLU else BN
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, WIDTH)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        row, column = place(tile, M, N, BM, WIDTH, GROUP)
        if SWIGLU:
            gate = tl.zeros([BM, HALF], tl.float32)
            up = tl.zeros([BM, HALF], tl.float32)
            for k in range(0, K, BK):
                rows = a.load([row, k])
                gate = tl.dot(rows, b.load([column, k]).T, gate)
                up = tl.dot(rows, b.load([N + column, k]).T, up)
            if bias is not None:
                gate = _add_bias(gate, bias, column, N, HALF)
                up = _add_bias(up, bias + N, column, N, HALF)
            _finish(gate / (1.0 + tl.exp(-gate)) * up, row, column, c, residual, out_scale)
        else:
            y = tl.zeros([BM, BN], tl.float32)
            for k in range(0, K, BK):
                y = tl.dot(a.load([row, k]), b.load([column, k]).T, y)
            # Two halves one after the other need half the shared memory on the way out.
            left, right = tl.split(tl.permute(tl.reshape(y, (BM, 2, HALF)), (0, 2, 1)))
            if bias is not None:
                left = _add_bias(left, bias, column, N, HALF)
                right = _add_bias(right, bias, column + HALF, N, HALF)
            if GELU:
                left, right = _gelu(left), _gelu(right)
            _finish(left, row, column, c, residual, out_scale)
            _finish(right, row, column + HALF, c, residual, out_scale)


def matmul(
    a_MK: Tensor,
    b_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    activation: Activation | None = None,
    residual_MN: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """a @ b.T with its epilogue; see the head of this file. `out_scale`: one float32, makes y float8 e4m3."""
    check("a_MK", a_MK, dtypes=(*FLOATS, torch.float64))
    a = as_rows("a_MK", a_MK)
    check("b_NK", b_NK, dtypes=(a.dtype,), shape=(None, a.shape[1]), beside=a)
    epilogue = Epilogue(bias_N, activation, residual_MN, out_scale)
    epilogue.check(a_MK, b_NK)
    dtype = _result_type(out_dtype, a, out_scale)
    shape = (*a_MK.shape[:-1], epilogue.columns(b_NK.shape[0]))
    if out is not None:
        output("out", out, shape, dtype, a)
    key = _key(a.shape[0], b_NK.shape[0], a.shape[1], a.dtype, epilogue)
    tiles, wins = _config(key, a.shape[0], b_NK.shape[0], epilogue)
    offers = {
        "triton": obstacle(a, b_NK, epilogue, shape[-1], dtype, out),
        "torch": None,
        "reference": None,
    }
    if wins == "torch":
        offers = {"torch": offers.pop("torch"), **offers}
    how = choose("matmul", impl, offers).impl
    if how != "triton":
        compute = matmul_reference if how == "reference" else with_epilogue
        return compute(a_MK, b_NK, epilogue, dtype, out)
    y = output("out", out, shape, dtype, a)
    if y.numel():
        flat = None if residual_MN is None else as_rows("residual_MN", residual_MN)
        launch(a, b_NK, as_rows("out", y), epilogue._replace(residual_MN=flat), tiles)
    return y


def _result_type(given: torch.dtype | None, a: Tensor, scale: Tensor | None) -> torch.dtype:
    if scale is not None:
        fine = given in (None, torch.float8_e4m3fn)
        require(fine, "out_dtype", "float8_e4m3fn with an out_scale", given)
        return torch.float8_e4m3fn
    fine = given is None or given in (*FLOATS, torch.float64)
    require(fine, "out_dtype", "a float type (float8 needs an out_scale)", given)
    return a.dtype if given is None else given


def obstacle(
    a: Tensor, b: Tensor, epilogue: Epilogue, columns: int, dtype: torch.dtype, out: Tensor | None
) -> str | None:
    """Why the kernel cannot run these, or None."""
    given = [t for t in (epilogue.bias_N, epilogue.residual_MN, out) if t is not None]
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"it multiplies bfloat16 and float16, not {short(a.dtype)}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (a, b, *given)):
        return "it has no backward, and a gradient is wanted"
    tiled = {"a_MK": a, "b_NK": b, "residual_MN": epilogue.residual_MN, "out": out}
    for name, tensor in tiled.items():
        if tensor is not None and (reason := tma_obstacle(name, tensor)) is not None:
            return reason
    if columns * dtype.itemsize % 16:
        return f"a row of {columns} {short(dtype)} is not a multiple of 16 bytes"
    return needs_cuda(a, b, *given) or (needs_hopper(a) if a.is_cuda else None)


LARGE = Tiles()
SMALL = Tiles(block_n=128, warps=4)
FEW = Tiles(block_m=64, block_n=128, warps=4, stages=5)
# GELU takes a third of the time of a short product: another program multiplies meanwhile.
PAIR = Tiles(block_n=128, warps=4, stages=3, per_sm=2, flatten=True)


def _key(m: int, n: int, k: int, dtype: torch.dtype, epilogue: Epilogue) -> str:
    kind = epilogue.activation or ("epilogue" if epilogue.needed() else "plain")
    return f"m={row_bucket(m)},n={n},k={k},{short(dtype)},{kind}"


def usual_tiles(m: int, n: int) -> Tiles:
    few = LARGE.number(m, n) < 132  # large tiles would leave multiprocessors without work
    return FEW if m <= 64 else SMALL if few else LARGE


def _config(key: str, m: int, n: int, epilogue: Epilogue) -> tuple[Tiles, str]:
    """Tiles and the faster implementation, "triton" or "torch"."""
    tiles = usual_tiles(m, n)
    if epilogue.activation == "gelu" and tiles is LARGE:
        tiles = PAIR
    default = {**tiles._asdict(), "impl": "triton" if epilogue.needed() else "torch"}
    found = tuned("matmul", key, default)
    return Tiles(**{name: found[name] for name in Tiles._fields}), str(found["impl"])


def launch(a: Tensor, b: Tensor, y: Tensor, epilogue: Epilogue, tiles: Tiles) -> None:
    """Run the kernel on checked two-dimensional operands."""
    (m, k), n = a.shape, y.shape[1]
    swiglu = epilogue.activation == "swiglu"
    half = tiles.block_n // 2
    columns = half if swiglu else tiles.block_n
    programs = tiles._replace(block_n=columns).programs(m, n, multiprocessors(a.device))
    beside = epilogue.residual_MN
    wide = y.element_size() > 2  # the way out takes the shared memory of a stage
    kernel: Any = _matmul_kernel
    kernel[(programs,)](
        row_tiles(a, [tiles.block_m, tiles.block_k]),
        TensorDescriptor.from_tensor(b, [columns, tiles.block_k]),
        TensorDescriptor.from_tensor(y, [tiles.block_m, half]),
        epilogue.bias_N,
        None if beside is None else TensorDescriptor.from_tensor(beside, [tiles.block_m, half]),
        epilogue.out_scale,
        *(m, n, k),
        **_constants(tiles, epilogue.activation),
        num_warps=tiles.warps,
        num_stages=min(tiles.stages, 3) if wide else tiles.stages,
    )


def _constants(tiles: Tiles, activation: Activation | None) -> dict[str, int | bool]:
    return {
        **tiles.constants(),
        "SWIGLU": activation == "swiglu",
        "GELU": activation == "gelu",
        "FLATTEN": tiles.flatten,
    }


def cost(m: int, n: int, k: int, *, swiglu: bool = False, residual: bool = False) -> Cost:
    """Cost with 16-bit operands and results; n counts gate and up."""
    results = m * (n // 2 if swiglu else n) * (2 if residual else 1)
    return Cost(2.0 * m * n * k, 2.0 * (m * k + n * k + results))
