"""Grouped matmul of `grouped_ring_kernel`: requirements, launch, and compiled variants.

Takes bfloat16 or float8 with scales of rows, whole tiles of columns, no bias and no clamped gate. What it leaves is for
the other forms of `grouped_matmul`, whose results it equals bit by bit.

    131,072 rows of 128 experts on an H200   gathered, 2048 to 768 with SwiGLU    768 to 2048
    float8                                   1,070 TFLOP/s (other form 881)       936 (840)
    bfloat16                                 632 (568)                            594 (630)

A form that quantised its rows itself, each by who wrote its last columns, took half as long again. Launched as a
dependent of its predecessor a layer takes 1% longer. Where experts have fewer than 512 rows each, gathered and gated
ones are faster through `grouped_kernel`, whose tiles are smaller. One matrix for all rows, as a case of this kernel,
was up to 17% behind cuBLAS from a graph.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from cairn.kernels.attention.attention_rings import AVERAGE_REGISTERS, shared_layout
from cairn.kernels.dependent import pdl
from cairn.kernels.experts.grouped_ring_kernel import (
    COLUMNS,
    ENTRY,
    ROWS,
    STAGED,
    ring_kernel,
    row_tiles_kernel,
)
from cairn.kernels.experts.matrices import Fp8Experts
from cairn.kernels.experts.sort_pairs import Pairs
from cairn.kernels.norm.rows import multiprocessors
from cairn.kernels.quantize.quantize import Quantized

STAGE_BYTES = 128  # of a row in a stage
TILE_BLOCK = 32  # tiles that a program lists


class RingPlan(NamedTuple):
    registers: int  # of a multiplying thread
    copying: int  # of a copying one; together with two of the others 3 x AVERAGE_REGISTERS
    stages: int = 4


GATHERED = RingPlan(216, 72)
IN_ORDER = RingPlan(232, 40)


def unfit(w: Tensor | Fp8Experts) -> str | None:
    """Why this kernel cannot multiply with these matrices, or None."""
    values = w if isinstance(w, Tensor) else w.values_ENK
    _, rows, inner = values.shape
    if values.dtype not in (torch.bfloat16, torch.float8_e4m3fn):
        return f"it multiplies bfloat16 and float8, not {values.dtype}"
    wide = STAGE_BYTES // values.element_size()
    if rows % COLUMNS.value or inner % wide:
        return f"{rows} x {inner} is no multiple of {COLUMNS.value} x {wide}"
    return None


def row_tiles(ends_E: Tensor, rows: int) -> Tensor:
    """The tiles of all experts' rows, as the kernel reads them; int32."""
    count = len(ends_E)
    most = min(rows, count) + rows // ROWS.value
    tiles = torch.empty((most + 1) * ENTRY.value, dtype=torch.int32, device=ends_E.device)
    kernel: Any = row_tiles_kernel
    kernel[(-(-most // TILE_BLOCK),)](
        ends_E, tiles, **tile_constants(count), num_warps=4, **pdl(ends_E.device)
    )
    return tiles


def grouped_ring(
    x: Tensor | Quantized,
    w: Tensor | Fp8Experts,
    pairs: Pairs,
    *,
    gather: bool,
    swiglu: bool,
    plan: RingPlan | None = None,
) -> Tensor:
    """Rows in the order of the pairs; the arguments have been checked."""
    x_MK, x_scales = (x, None) if isinstance(x, Tensor) else x
    w_ENK, w_scales = (w, None) if isinstance(w, Tensor) else (w.values_ENK, w.scale_EN)
    columns = w_ENK.shape[1] // 2 if swiglu else w_ENK.shape[1]
    y_PN = torch.empty(pairs.total, columns, dtype=torch.bfloat16, device=x_MK.device)
    if not pairs.total:
        return y_PN
    tiles = row_tiles(pairs.ends_E, pairs.total) if pairs.row_tiles is None else pairs.row_tiles
    plan = plan or (GATHERED if gather else IN_ORDER)
    kernel: Any = ring_kernel
    kernel[(multiprocessors(x_MK.device),)](
        x_MK, descriptor(x_MK, ROWS.value), descriptor(w_ENK.flatten(0, 1), STAGED.value), y_PN,
        pairs.order_P, tiles, x_scales, w_scales, columns, x_MK.stride(0),
        **constants(w_ENK.dtype, w_ENK.shape[1], w_ENK.shape[2], pairs.per_token, gather, swiglu, plan),
        num_warps=4, maxnreg=AVERAGE_REGISTERS,
    )  # fmt: skip
    return y_PN


def descriptor(x_MK: Tensor, rows: int) -> TensorDescriptor:
    block = [rows, STAGE_BYTES // x_MK.element_size()]
    return TensorDescriptor(
        x_MK, list(x_MK.shape), list(x_MK.stride()), block, shared_layout(block, x_MK.dtype)
    )


def tile_constants(count: int) -> dict[str, int]:
    wide = 1 << (count - 1).bit_length()
    return {"COUNT": count, "WIDTH": wide, "BM": ROWS.value, "BLOCK": TILE_BLOCK}


def constants(
    dtype: torch.dtype,
    height: int,
    inner: int,
    per_token: int,
    gather: bool,
    swiglu: bool,
    plan: RingPlan,
) -> dict[str, int | bool]:
    """`height`: rows of a matrix."""
    return {
        "K": inner,
        "BK": STAGE_BYTES // dtype.itemsize,
        "PER_TOKEN": per_token,
        "GATHER": gather,
        "SWIGLU": swiglu,
        "STAGES": plan.stages,
        "BLOCKS": height // COLUMNS.value,
        "REGISTERS": plan.registers,
        "COPYING": plan.copying,
    }
