"""y = x @ (w * scale_w).T for few rows of x, with float8 weights: the kernels of skinny_matmul read half the bytes.

    one row     x in 16 bits; a program keeps rows of w in registers and multiplies in float32 on the ordinary cores
    2 to 256    x is float8 with a scale for each row, too; the tensor cores multiply in float8, as in matmul_fp8

Then + bias -> SwiGLU -> y, or the float32 parts of a K that was cut, for `join_add_rmsnorm`. Scales multiply the sums.
w may have a scale for each block of 128 x 128 instead of one for each row; then K has whole blocks.
`prefetch` is that of skinny_matmul. Bytes moved: N*K + M*K, and M*N elements.
"""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from cairn.kernels.arguments import as_rows, check, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.few_rows import MOST_ROWS, empty_rows, padded_rows
from cairn.kernels.kernel import Cost
from cairn.kernels.matmul.epilogue import Activation, Epilogue, matmul_reference
from cairn.kernels.matmul.skinny_matmul import (
    JOINED,
    KERNELS,
    launch_constants,
    tile_descriptor,
    tile_descriptor_of_pairs,
)
from cairn.kernels.matmul.skinny_plans import (
    FEW_ROWS,
    PIECE,
    SHORTEST_PART,
    SMALL_RING,
    Plan,
    default_plan,
    row_block,
    wave_plan,
)
from cairn.kernels.matmul.skinny_row import one_row_kernel
from cairn.kernels.quantize.quantize import Quantized
from cairn.kernels.tiles import tma_obstacle
from cairn.kernels.tuned import tuned

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # rows and columns that share a scale
BLOCK_PROGRAMS = 192  # fewer leave multiprocessors waiting
HELD_BYTES = 128  # of weights in a thread, up to which 64 registers are enough
LONGEST_ROW = 1 << 15  # columns that the kernel for one row takes
HALVES = (torch.bfloat16, torch.float16)


def skinny_fp8_reference(x: Tensor | Quantized, w: Quantized, epilogue: Epilogue) -> Tensor:
    """Reference in float32; y is bfloat16, or has the dtype of a 16-bit x."""
    kind = x.dtype if isinstance(x, Tensor) else torch.bfloat16
    wide = x.float() if isinstance(x, Tensor) else x.values.float() * x.scale
    return matmul_reference(wide, w.values.float() * row_scales(w), epilogue, kind)


def is_blocked(w: Quantized) -> bool:
    """Return whether the scales are for blocks of 128 x 128 rather than for rows."""
    n, k = w.values.shape
    return tuple(w.scale.shape) == (-(-n // BLOCK), k // BLOCK) != (n, 1) and k % BLOCK == 0


def row_scales(w: Quantized) -> Tensor:
    """A scale for each row [N, 1], or for each weight [N, K] where blocks have them."""
    if not is_blocked(w):
        return w.scale
    return w.scale.repeat_interleave(BLOCK, 0)[: len(w.values)].repeat_interleave(BLOCK, 1)


def skinny_fp8(
    x: Tensor | Quantized,
    w: Quantized,
    *,
    bias_N: Tensor | None = None,
    activation: Activation | None = None,
    prefetch: bool = False,
    impl: Impl = "auto",
) -> Tensor:
    """Multiply one 16-bit row x [1, K] or up to 256 quantised rows with w [N, K], quantised by rows or blocks."""
    values = _checked(x, w)
    require(activation in (None, "swiglu"), "activation", "'swiglu' or None", repr(activation))
    epilogue = Epilogue(bias_N, activation)
    epilogue.check(values, w.values)
    m, n = len(values), len(w.values)
    plan = plan_of(x, w)
    offers = {"triton": _obstacle(values, w, plan), "reference": None}
    if choose("skinny_fp8", impl, offers).impl == "reference":
        return skinny_fp8_reference(x, w, epilogue)
    kind = values.dtype if isinstance(x, Tensor) else torch.bfloat16
    y = empty_rows((m, epilogue.columns(n)), kind, values.device)
    if y.numel():
        launch(x, w, y, epilogue, plan, prefetch)
    return y


def skinny_fp8_parts(x: Quantized, w: Quantized, *, prefetch: bool = False) -> Tensor | None:
    """Float32 sums [parts, M, N], for whoever joins them together with what follows; None where K is not cut."""
    values = _checked(x, w)
    (m, k), n = values.shape, len(w.values)
    plan = plan_of(x, w)
    split = plan.parts(k)
    if split == 1 or m == 0 or _obstacle(values, w, plan) is not None:
        return None
    parts = values.new_empty(split, m, n, dtype=torch.float32)
    _launch_stream(x, w, parts, parts, Epilogue(), plan, prefetch)
    return parts


def _checked(x: Tensor | Quantized, w: Quantized) -> Tensor:
    """The values of x, if both operands are what the kernels were written for."""
    check("w.values", w.values, dtypes=(E4M3,), shape=(None, None), packed=True)
    n, k = w.values.shape
    shape = tuple(w.scale.shape) if is_blocked(w) else (n, 1)
    check("w.scale", w.scale, dtypes=(torch.float32,), shape=shape, beside=w.values, packed=True)
    if isinstance(x, Tensor):
        check("x", x, dtypes=(*HALVES, torch.float32), shape=(1, k), beside=w.values)
        return as_rows("x", x)
    check("x.values", x.values, dtypes=(E4M3,), shape=(None, k), beside=w.values)
    m = len(x.values)
    require(m <= MOST_ROWS, "x.values", f"at most {MOST_ROWS} rows", m)
    check("x.scale", x.scale, dtypes=(torch.float32,), shape=(m, 1), beside=w.values, packed=True)
    return as_rows("x.values", x.values)


def _obstacle(x: Tensor, w: Quantized, plan: Plan) -> str | None:
    """Why the kernels cannot run these, or None."""
    if x.dtype == torch.float32:
        return "it takes one row of bfloat16 or float16, not float32"
    for name, rows in {"x": x, "w.values": w.values}.items():
        if (reason := tma_obstacle(name, rows)) is not None:
            return reason
    if w.values.shape[1] > LONGEST_ROW and plan.kernel == "row":
        return f"{w.values.shape[1]} columns do not fit the registers of one program"
    # The interpreter has no Hopper; it runs the kernel for one row, and none in Gluon.
    return needs_cuda(x) or (needs_hopper(x) if x.is_cuda or plan.kernel == "stream" else None)


def fp8_plan(m: int, n: int, k: int, one_row: bool) -> Plan:
    """Plan of the 16-bit matmul with as many bytes and twice the columns; above 64 rows one wave of programs."""
    if m > FEW_ROWS and (wave := wave_plan(m, n, k)) is not None:
        return wave
    plan = default_plan(1 if one_row else max(m, 2), n, -(-k // 2))
    return plan._replace(block_k=2 * plan.block_k)


@functools.lru_cache(maxsize=4096)
def _default(m: int, n: int, k: int, one_row: bool) -> tuple[str, dict[str, Any]]:
    """The key of the tuned table, and what runs without an entry."""
    rows = "one row" if one_row else f"m={padded_rows(m)}"
    return f"{rows},n={n},k={k},{short(E4M3)}", fp8_plan(m, n, k, one_row)._asdict()


def block_plan(m: int, n: int, k: int) -> Plan:
    """A block is a step. Several programs share a multiprocessor: while one scales, others read."""
    split, tiles = 1, -(-n // PIECE)
    while tiles * split < BLOCK_PROGRAMS and k >= 2 * split * SHORTEST_PART:
        split *= 2
    stages = SMALL_RING // (BLOCK * (PIECE + row_block(m)))
    return Plan("stream", PIECE, BLOCK, split, 4, min(stages, -(-k // (BLOCK * split))))


def plan_of(x: Tensor | Quantized, w: Quantized) -> Plan:
    n, k = w.values.shape
    one_row = isinstance(x, Tensor)
    if is_blocked(w) and not one_row:
        return block_plan(len(x.values), n, k)
    return Plan(**tuned("skinny_fp8", *_default(1 if one_row else len(x.values), n, k, one_row)))


def launch(
    x: Tensor | Quantized,
    w: Quantized,
    y: Tensor,
    epilogue: Epilogue,
    plan: Plan,
    prefetch: bool = False,
) -> None:
    """Run the kernels on checked operands."""
    if isinstance(x, Tensor):
        launch_row(x, w, y, epilogue, plan, prefetch)
        return
    (m, k), n = x.values.shape, len(w.values)
    swiglu = epilogue.activation is not None
    split = plan.parts(k)
    # Gate and up of one tile are in different blocks: their sums are joined by another kernel.
    if split == 1 and not (swiglu and (n % 16 or is_blocked(w))):
        _launch_stream(x, w, y, None, epilogue, plan, prefetch)
        return
    parts = y.new_empty(split, m, n, dtype=torch.float32)
    _launch_stream(x, w, y, parts, Epilogue(), plan, prefetch)
    common = launch_constants(plan, prefetch)
    KERNELS["join"][triton.cdiv(y.shape[1], JOINED), m](
        *(parts, epilogue.bias_N, None, y, 0, y.stride(0), m, y.shape[1]),
        PARTS=split,
        SWIGLU=swiglu,
        BLOCK=JOINED,
        OVERLAP=common["OVERLAP"],
        num_warps=2,
        launch_pdl=common["OVERLAP"],
    )


def most_registers(plan: Plan, k: int, blocks: bool) -> int | None:
    """Register limit of a thread; above 64 a multiprocessor fits three programs of 8 warps instead of four."""
    held = plan.block_n * triton.cdiv(k, plan.block_k) * plan.block_k // (32 * plan.warps)
    return 64 if held <= HELD_BYTES and not blocks else None


def launch_row(
    x: Tensor, w: Quantized, y: Tensor, epilogue: Epilogue, plan: Plan, prefetch: bool = False
) -> None:
    """Launch the kernel for one row of x; w may be int8."""
    n, k = w.values.shape
    kernel: Any = one_row_kernel
    kernel[(triton.cdiv(n, plan.block_n),)](
        *(x, w.values, w.scale, epilogue.bias_N, None, y, w.values.stride(0), n, k),
        BN=plan.block_n,
        BK=plan.block_k,
        CHUNKS=triton.cdiv(k, plan.block_k),
        WHOLE=k % plan.block_k == 0,
        WARPS=plan.warps,
        BLOCKS=is_blocked(w),
        SWIGLU=epilogue.activation is not None,
        maxnreg=most_registers(plan, k, is_blocked(w)),
        **launch_constants(plan, prefetch),
    )


def _launch_stream(
    x: Quantized,
    w: Quantized,
    y: Tensor,
    parts: Tensor | None,
    epilogue: Epilogue,
    plan: Plan,
    prefetch: bool,
) -> None:
    """Into y, with all that follows; or the scaled sums alone into `parts`, and y is not touched."""
    (m, k), n = x.values.shape, len(w.values)
    split, rows = plan.parts(k), row_block(m)
    swiglu = epilogue.activation is not None and parts is None
    block = [rows, plan.block_k]
    KERNELS["stream"][(triton.cdiv(n, plan.block_n) * split * triton.cdiv(m, rows),)](
        tile_descriptor(x.values, block),
        tile_descriptor_of_pairs(w.values, plan.block_k)
        if swiglu
        else tile_descriptor(w.values, [PIECE, plan.block_k]),
        *(x.scale, w.scale, epilogue.bias_N, None, y, parts, 0, y.stride(-2), m, n, k),
        PIECES=plan.block_n // PIECE,
        SPLIT=split,
        STAGES=plan.stages,
        BLOCKS=is_blocked(w),
        SWIGLU=swiglu,
        **launch_constants(plan, prefetch),
    )


def cost(m: int, n: int, k: int) -> Cost:
    return Cost(2.0 * m * n * k, float(n * k + m * k + 2 * m * n))
