"""y = act(gate) * up: what stands between the two products of a gated feed-forward layer.

    silu        SwiGLU (Llama, Qwen)
    gelu_tanh   GeGLU as Gemma has it: gelu by its tanh approximation
    gelu        GeGLU by the error function

Gate and up are two tensors, or the halves of one [..., 2F] as it comes out of a fused projection. Computed in
float32; act(gate) is rounded to the tensors' type before up multiplies it, as the plain model rounds it. The fp8
form quantises the rounded result by rows, exactly as `quantize` would. Bytes moved: 3*T*F elements, or 2*T*F
elements and T*F bytes. Gradients are in activation_backward.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.arguments import as_rows, output, require, short
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Cost
from cairn.kernels.layer.activation_backward import (
    KINDS,
    act,
    gated_activation_backward,
    gated_rows,
)
from cairn.kernels.norm.rows import (
    blocks,
    default_layout,
    launch,
    layout,
    too_wide,
    width,
)
from cairn.kernels.quantize.quantize import (
    Quantized,
    filled,
    fp8_rows,
    quantize_reference,
    quantized_rows,
)
from cairn.kernels.tuned import tuned

Activation = Literal["silu", "gelu_tanh", "gelu"]
DEFAULT = {"block": 2048, "warps": 4}


def gated_activation_reference(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    wide = gate if gate.dtype == torch.float64 else gate.float()
    if activation == "silu":
        wide = F.silu(wide)
    else:
        wide = F.gelu(wide, approximate="tanh" if activation == "gelu_tanh" else "none")
    return wide.to(gate.dtype) * up


@triton.jit
def _gated_kernel(
    gate, up, y, gate_stride, up_stride, y_stride,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    row = (tl.program_id(0) // tl.cdiv(COLUMNS, BLOCK)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(COLUMNS, BLOCK) * BLOCK + tl.arange(0, BLOCK)
    mask = column < COLUMNS
    g = tl.load(gate + row * gate_stride + column, mask=mask, other=0.0)
    u = tl.load(up + row * up_stride + column, mask=mask, other=0.0)
    a = act(g.to(tl.float32), KIND)[0].to(g.dtype)
    tl.store(y + row * y_stride + column, a * u, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def _gated_fp8_kernel(
    gate, up, y, scale, rows, gate_stride, up_stride, y_stride,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    column = tl.arange(0, WIDTH)[None, :]
    step = tl.num_programs(0) * ROWS
    for first in tl.range(tl.program_id(0) * ROWS, rows, step, num_stages=STAGES):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column < COLUMNS)
        at = row.to(tl.int64)
        g = tl.load(gate + at * gate_stride + column, mask=mask, other=0.0)
        u = tl.load(up + at * up_stride + column, mask=mask, other=0.0)
        a = act(g.to(tl.float32), KIND)[0].to(g.dtype)
        values, row_scale = fp8_rows((a * u).to(tl.float32))
        tl.store(y + at * y_stride + column, values, mask=mask)
        tl.store(scale + row, row_scale[:, None], mask=row < rows)


def gated_activation(
    gate: Tensor,
    up: Tensor | None = None,
    activation: Activation = "silu",
    *,
    out: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """act(gate) * up; without `up`, gate [..., 2F] holds both halves. Differentiable."""
    gate_part, up_part, _ = _inputs(gate, up, activation)
    chosen = choose("activation", impl, {"triton": needs_cuda(gate), "reference": None})
    tracked = torch.is_grad_enabled() and (gate.requires_grad or up_part.requires_grad)
    require(out is None or not tracked, "out", "none while gradients are kept", "one")
    if chosen.impl == "reference":
        y = gated_activation_reference(gate_part, up_part, activation)
        return y if out is None else output("out", out, y.shape, y.dtype, y).copy_(y)
    if tracked:
        return _Gated.apply(gate, up, activation)
    y = output("out", out, gate_part.shape, gate.dtype, gate)
    _launch(gate, up, activation, y)
    return y


def swiglu(gate: Tensor, up: Tensor | None = None, **options: Any) -> Tensor:
    return gated_activation(gate, up, "silu", **options)


def geglu(gate: Tensor, up: Tensor | None = None, tanh: bool = True, **options: Any) -> Tensor:
    return gated_activation(gate, up, "gelu_tanh" if tanh else "gelu", **options)


def gated_activation_fp8(
    gate: Tensor,
    up: Tensor | None = None,
    activation: Activation = "silu",
    *,
    out: Quantized | None = None,
    impl: Impl = "auto",
) -> Quantized:
    """quantize(gated_activation(gate, up)) in one pass. Not differentiable."""
    gate_part, up_part, columns = _inputs(gate, up, activation)
    y = quantized_rows(gate_part, torch.float8_e4m3fn, out)
    offers = {"triton": needs_cuda(gate) or too_wide(columns), "reference": None}
    if choose("activation", impl, offers).impl == "reference":
        return filled(
            y, quantize_reference(gated_activation_reference(gate_part, up_part, activation))
        )
    _launch_fp8(gate, up, activation, y)
    return y


def _inputs(gate: Tensor, up: Tensor | None, activation: str) -> tuple[Tensor, Tensor, int]:
    """Both operands as tensors of their own shape, and how many columns they have."""
    require(activation in KINDS, "activation", " or ".join(KINDS), activation)
    gated_rows(gate, up)
    if up is None:
        gate, up = gate.chunk(2, dim=-1)
    return gate, up, gate.shape[-1]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: Activation) -> Tensor:
        columns = gate.shape[-1] // (2 if up is None else 1)
        y = torch.empty((*gate.shape[:-1], columns), dtype=gate.dtype, device=gate.device)
        _launch(gate, up, activation, y)
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> Any:  # pyrefly: ignore[bad-override]
        gate, up = ctx.saved_tensors
        grad = grad_outputs[0].contiguous()
        d_gate, d_up = gated_activation_backward(grad, gate, up, ctx.activation, impl="triton")
        return d_gate, d_up, None


def _launch(gate: Tensor, up: Tensor | None, activation: str, y: Tensor) -> None:
    gate_TF, up_TF = gated_rows(gate, up)
    y_TF = as_rows("out", y)
    rows, columns = gate_TF.shape
    if not rows:
        return
    how = tuned("activation", short(gate.dtype), DEFAULT)
    block = min(how["block"], width(columns))
    launch(
        _gated_kernel, rows * blocks(columns, block),
        gate_TF, up_TF, y_TF, gate_TF.stride(0), up_TF.stride(0), y_TF.stride(0),
        KIND=KINDS[activation], COLUMNS=columns, BLOCK=block, num_warps=how["warps"], **pdl(y.device),
    )  # fmt: skip


def _launch_fp8(gate: Tensor, up: Tensor | None, activation: str, y: Quantized) -> None:
    gate_TF, up_TF = gated_rows(gate, up)
    y_TF = as_rows("out", y.values)
    rows, columns = gate_TF.shape
    if not rows:
        return
    how = layout("activation", "fp8", columns, gate.dtype, default_layout(columns))
    launch(
        _gated_fp8_kernel, how.programs(rows, gate.device),
        gate_TF, up_TF, y_TF, y.scale, rows,
        gate_TF.stride(0), up_TF.stride(0), y_TF.stride(0),
        KIND=KINDS[activation], COLUMNS=columns, WIDTH=width(columns), ROWS=how.rows,
        STAGES=how.stages, num_warps=how.warps, **pdl(gate.device),
    )  # fmt: skip


def cost(rows: int, columns: int, element_bytes: int = 2, fp8: bool = False) -> Cost:
    moved = 2 * element_bytes + (1 if fp8 else element_bytes)
    return Cost(6 * rows * columns, rows * columns * moved)
