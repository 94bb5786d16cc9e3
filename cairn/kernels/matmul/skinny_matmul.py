"""y = x @ w.T for few rows of x: a decode step, where reading w is all the work.

    x [M, K], w [N, K] (as nn.Linear keeps it)  ->  + bias  ->  SwiGLU  ->  + residual  ->  y [M, N]

Every weight is read once, so the time to beat is the bytes of w over the bandwidth. Two kernels share the shapes:

    row      one row of x: a program keeps whole rows of w in registers and multiplies on the ordinary cores
    stream   tensor cores, on tiles of w that come through a deep ring of shared memory

A short product is over before the next launch has begun, so these kernels start while their predecessor still runs
(programmatic dependent launch). With `prefetch` they also read their weights before it has ended: promise that only of
weights that nothing before in the stream has just written. Then all that is left behind the predecessor is to read x.

Where there are too few tiles of w, K is cut into parts, whose float32 sums a second small kernel joins in their order.
Results are the same from run to run; they may differ in the last bit between numbers of rows.
Nothing is read back by the host; all of it can live in a CUDA graph.
Bytes moved: N*K + M*K + M*N elements, and twice split*M*N float32 through the L2 cache.
"""

import functools
import os
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.arguments import as_rows, check, output, require, short
from cairn.kernels.attention.attention_rings import shared_layout
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.few_rows import MOST_ROWS, empty_rows, padded_rows, readable_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference, with_epilogue
from cairn.kernels.matmul.skinny_kernels import join_kernel, row_kernel
from cairn.kernels.matmul.skinny_plans import (
    BESIDE_RING,
    PIECE,
    Plan,
    beside_plan,
    default_plan,
    row_block,
)
from cairn.kernels.matmul.skinny_stream import stream_kernel
from cairn.kernels.tiles import tma_obstacle
from cairn.kernels.tuned import tuned

JOINED = 256  # columns that a program joins
KERNELS: dict[str, Any] = {"row": row_kernel, "stream": stream_kernel, "join": join_kernel}


def skinny_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    activation: Activation | None = None,
    residual_MN: Tensor | None = None,
    out: Tensor | None = None,
    prefetch: bool = False,
    shares_chip: bool = False,
    ring: int = BESIDE_RING,
    impl: Impl = "auto",
) -> Tensor:
    """x @ w.T and what follows; x has at most 256 rows. See the head of this file, also for `prefetch`.

    `shares_chip`: attention runs at the same time in another stream, and this should fit into the bytes of shared
    memory that it leaves (`ring`).
    """
    x = _checked(x_MK, w_NK)
    m, k = x.shape
    require(activation in (None, "swiglu"), "activation", "'swiglu' or None", repr(activation))
    epilogue = Epilogue(bias_N, activation, residual_MN)
    epilogue.check(x_MK, w_NK)
    n = w_NK.shape[0]
    shape = (*x_MK.shape[:-1], epilogue.columns(n))
    if out is not None:
        output("out", out, shape, x.dtype, x)
    plan, wins = (
        (beside_plan(m, n, k, ring), "triton") if shares_chip else _config(m, n, k, x.dtype)
    )
    offers = {"triton": _obstacle(x, w_NK, epilogue, plan), "torch": None, "reference": None}
    if wins == "torch":
        offers = {"torch": None, **offers}
    how = choose("skinny_matmul", impl, offers).impl
    if how != "triton":
        compute = matmul_reference if how == "reference" else with_epilogue
        return compute(x_MK, w_NK, epilogue, x.dtype, out)
    y = empty_rows(shape, x.dtype, x.device) if out is None else out
    if y.numel():
        flat = None if residual_MN is None else as_rows("residual_MN", residual_MN)
        after = epilogue._replace(residual_MN=flat)
        launch(x, w_NK, as_rows("out", y), after, plan, prefetch)
    return y


def skinny_parts(
    x_MK: Tensor,
    w_NK: Tensor,
    *,
    prefetch: bool = False,
    shares_chip: bool = False,
    ring: int = BESIDE_RING,
) -> Tensor | None:
    """Float32 sums [parts, M, N], for whoever joins them together with what follows; None where K is not cut."""
    x, n = _checked(x_MK, w_NK), w_NK.shape[0]
    m, k = x.shape
    plan, wins = (
        (beside_plan(m, n, k, ring), "triton") if shares_chip else _config(m, n, k, x.dtype)
    )
    split = plan.parts(k)
    cut = plan.kernel == "stream" and split > 1 and wins == "triton" and m > 0
    if not cut or _obstacle(x, w_NK, Epilogue(), plan) is not None:
        return None
    parts = x.new_empty(split, m, n, dtype=torch.float32)
    _launch_tiles(x, w_NK, x, parts, Epilogue(), plan, launch_constants(plan, prefetch))
    return parts


def _checked(x_MK: Tensor, w_NK: Tensor) -> Tensor:
    """x as rows, if both operands are what the kernels were written for."""
    check("x_MK", x_MK, dtypes=(torch.bfloat16, torch.float16, torch.float32))
    x = as_rows("x_MK", x_MK)
    require(x.shape[0] <= MOST_ROWS, "x_MK", f"at most {MOST_ROWS} rows", x.shape[0])
    check("w_NK", w_NK, dtypes=(x.dtype,), shape=(None, x.shape[1]), beside=x)
    return x


def _obstacle(x: Tensor, w: Tensor, epilogue: Epilogue, plan: Plan) -> str | None:
    """Why the kernels cannot run these, or None."""
    if x.dtype == torch.float32:
        return "it multiplies bfloat16 and float16, not float32"
    given = [t for t in (x, w, epilogue.bias_N, epilogue.residual_MN) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "it has no backward, and a gradient is wanted"
    blocked = (
        None if _aligned(x) and _aligned(w) else tma_obstacle("x_MK", x) or tma_obstacle("w_NK", w)
    )
    blocked = blocked or needs_cuda(*given)
    # The interpreter has no Hopper; it runs the kernel for one row, and none in Gluon.
    return blocked or (needs_hopper(x) if x.is_cuda or plan.kernel == "stream" else None)


def _aligned(rows: Tensor) -> bool:
    """The usual case, told faster than `tma_obstacle` tells what is wrong."""
    return rows.stride(1) == 1 and rows.stride(0) % 8 == 0 and rows.data_ptr() % 16 == 0


@functools.lru_cache(maxsize=4096)
def _default(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[str, dict[str, Any]]:
    """The key of the tuned table, and what runs without an entry."""
    key = f"m={1 if m == 1 else padded_rows(m)},n={n},k={k},{short(dtype)}"
    return key, {**default_plan(max(m, 1), n, k)._asdict(), "impl": "triton"}


def _config(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Plan, str]:
    """Plan and the faster implementation, "triton" or "torch"."""
    found = tuned("skinny_matmul", *_default(m, n, k, dtype))
    return Plan(*(found[name] for name in Plan._fields)), found["impl"]


def launch(
    x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, plan: Plan, prefetch: bool = False
) -> None:
    """Run the kernels on checked two-dimensional operands."""
    common = launch_constants(plan, prefetch)
    if plan.kernel == "row":
        _launch_row(x, w, y, epilogue, plan, common)
    else:
        _launch_stream(x, w, y, epilogue, plan, common)


def launch_constants(plan: Plan, prefetch: bool) -> dict[str, Any]:
    overlap = plan.overlap and os.environ.get("TRITON_INTERPRET") != "1"
    return dict(OVERLAP=overlap, EARLY=prefetch, num_warps=plan.warps, launch_pdl=overlap)


def _launch_row(
    x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, plan: Plan, common: dict[str, Any]
) -> None:
    (n, k), swiglu = w.shape, epilogue.activation is not None
    KERNELS["row"][(triton.cdiv(n, plan.block_n),)](
        *(x, w, None, epilogue.bias_N, epilogue.residual_MN, y, w.stride(0), n, k),
        BN=plan.block_n, BK=plan.block_k, CHUNKS=triton.cdiv(k, plan.block_k), SWIGLU=swiglu, **common,
    )  # fmt: skip


def _launch_stream(
    x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, plan: Plan, common: dict[str, Any]
) -> None:
    (m, k), n = x.shape, w.shape[0]
    bias, residual = epilogue.bias_N, epilogue.residual_MN
    swiglu = epilogue.activation is not None
    split = plan.parts(k)
    apart = split > 1 or (swiglu and n % 16 != 0)  # else the kernel does all of it
    parts = x.new_empty(split, m, n, dtype=torch.float32) if apart else None
    _launch_tiles(x, w, y, parts, epilogue, plan, common)
    if apart:
        stride_r = 0 if residual is None else residual.stride(0)
        KERNELS["join"][triton.cdiv(y.shape[1], JOINED), m](
            *(parts, bias, residual, y, stride_r, y.stride(0), m, y.shape[1]),
            PARTS=split, SWIGLU=swiglu, BLOCK=JOINED, OVERLAP=common["OVERLAP"], num_warps=2,
            launch_pdl=common["OVERLAP"],
        )  # fmt: skip


def _launch_tiles(
    x: Tensor, w: Tensor, y: Tensor, parts: Tensor | None, epilogue: Epilogue, plan: Plan, common: dict[str, Any]
) -> None:  # fmt: skip
    """Into y, with all that follows; or the sums alone into `parts`, and y is not touched."""
    (m, k), n = x.shape, w.shape[0]
    residual = epilogue.residual_MN
    swiglu = epilogue.activation is not None and parts is None
    stride_r = 0 if residual is None else residual.stride(0)
    split = plan.parts(k)
    blocks = triton.cdiv(m, row_block(m))
    KERNELS["stream"][(triton.cdiv(n, plan.block_n) * split * blocks,)](
        tile_descriptor(x, [row_block(m), plan.block_k]),
        tile_descriptor_of_pairs(w, plan.block_k) if swiglu else tile_descriptor(w, [PIECE, plan.block_k]),
        *(None, None, epilogue.bias_N, residual, y, parts, stride_r, y.stride(0), m, n, k),
        PIECES=plan.block_n // PIECE, SPLIT=split, STAGES=plan.stages, BLOCKS=False, SWIGLU=swiglu, **common,
    )  # fmt: skip


def tile_descriptor(rows: Tensor, block: list[int]) -> TensorDescriptor:
    layout = shared_layout(block, rows.dtype)
    shape = [readable_rows(rows, block[0]), rows.shape[1]]
    return TensorDescriptor(rows, shape, list(rows.stride()), block, layout)


def tile_descriptor_of_pairs(w: Tensor, columns: int) -> TensorDescriptor:
    """8 rows of the gate, then the same 8 of up, and so on: as if w's rows lay in that order."""
    (n, k), stride, block = w.shape, w.stride(0), [PIECE // 16, 2, 8, columns]
    shape, strides = [n // 16, 2, 8, k], [8 * stride, n // 2 * stride, stride, 1]
    return TensorDescriptor(w, shape, strides, block, shared_layout(block, w.dtype))


def cost(m: int, n: int, k: int) -> Cost:
    return Cost(2.0 * m * n * k, 2.0 * (n * k + m * k + m * n))
