"""y = act(gate) * up: what stands between the two products of a gated feed-forward layer.

    silu        SwiGLU (Llama, Qwen)
    gelu_tanh   GeGLU as Gemma has it: gelu by its tanh approximation
    gelu        GeGLU by the error function

Gate and up are two tensors, or the halves of one [..., 2F] as it comes out of a fused projection. Computed in
float32; act(gate) is rounded to the tensors' type before up multiplies it, as the plain model rounds it. The fp8
form quantises the rounded result by rows, exactly as `quantize` would. Bytes moved: 3*T*F elements, or 2*T*F
elements and T*F bytes. Gradients are in activation_backward.
"""

import functools
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.arguments import as_rows, output, require, short
from cairn.kernels.dependent import begin, pdl
from cairn.kernels.dispatch import Impl, choose, needs_cuda
from cairn.kernels.kernel import Case, Cost, Prepared, Variant
from cairn.kernels.layer.activation_backward import (
    KINDS,
    act,
    gated_activation_backward,
    gated_rows,
)
from cairn.kernels.norm.rows import (
    Layout,
    blocks,
    candidates,
    default_layout,
    key,
    launch,
    layout,
    shipped_layouts,
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
from cairn.kernels.tuned import Tuning, shipped, tuned

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
    STAGES: tl.constexpr,
):  # fmt: skip
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
        STAGES=how.stages, num_warps=how.warps,
    )  # fmt: skip


def cost(rows: int, columns: int, element_bytes: int = 2, fp8: bool = False) -> Cost:
    moved = 2 * element_bytes + (1 if fp8 else element_bytes)
    return Cost(6 * rows * columns, rows * columns * moved)


_STRIDES = ("gate_stride", "up_stride", "y_stride")


def _variant(kind: str, columns: int, block: int, warps: int) -> Variant:
    pointers = dict.fromkeys(("gate", "up", "y"), "*bf16")
    return Variant(
        f"{kind} gate {columns}, block {block}, {warps} warps",
        _gated_kernel,
        pointers | dict.fromkeys(_STRIDES, "i32"),
        {"KIND": KINDS[kind], "COLUMNS": columns, "BLOCK": block, "OVERLAP": True},
        {"num_warps": warps},
        [*pointers, *_STRIDES],
    )


def _variant_fp8(columns: int, how: Layout) -> Variant:
    pointers = {"gate": "*bf16", "up": "*bf16", "y": "*fp8e4nv", "scale": "*fp32"}
    return Variant(
        f"silu gate {columns} + fp8, {how}",
        _gated_fp8_kernel,
        pointers | dict.fromkeys(_STRIDES, "i32") | {"rows": "i32"},
        {"KIND": KINDS["silu"], "COLUMNS": columns, "WIDTH": width(columns)}
        | {"ROWS": how.rows, "STAGES": how.stages},
        {"num_warps": how.warps},
        [*pointers, *_STRIDES],
    )


_CANDIDATES = [{"block": b, "warps": w} for b, w in
               ((1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))]  # fmt: skip
VARIANTS = [
    _variant("silu", 14336, 2048, 4),
    _variant("gelu_tanh", 14336, 2048, 4),
    _variant("gelu", 14336, 2048, 4),
    _variant_fp8(3072, default_layout(3072)),
    _variant_fp8(14336, default_layout(14336)),
]


def tuned_variants() -> Iterator[Variant]:
    for _, columns, rows in shipped_layouts("activation"):
        yield _variant_fp8(columns, rows)
    for entry, how in shipped("activation"):
        if entry == "bfloat16":
            yield from (_variant(kind, 14336, how["block"], how["warps"]) for kind in KINDS)


_ROWS = 16384
_WIDTHS = (3072, 12288, 14336)  # Qwen3-0.6B, Qwen3-8B, Llama-3-8B


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        for fp8 in (False, True):
            yield Case(
                f"swiglu{'_fp8' * fp8}",
                f"{_ROWS} x {columns}",
                "bf16",
                cost(_ROWS, columns, fp8=fp8),
                functools.partial(_prepare, columns, fp8, "silu"),
                tolerance=5e-2 if fp8 else 1e-2,
                graph=True,
            )
    yield Case(
        "geglu",
        f"{_ROWS} x 12288",
        "bf16",
        cost(_ROWS, 12288),
        functools.partial(_prepare, 12288, False, "gelu_tanh"),
        graph=True,
    )


def _prepare(columns: int, fp8: bool, activation: Activation) -> Prepared:
    x = torch.randn(_ROWS, 2 * columns, device="cuda").bfloat16()
    out = quantized_rows(x[:, :columns], torch.float8_e4m3fn, None)
    out = out if fp8 else Quantized(torch.empty_like(x[:, :columns]), out.scale)

    def run() -> Any:
        if fp8:
            return _launch_fp8(x, None, activation, out)
        return _launch(x, None, activation, out.values)

    def error() -> float:
        poison(*out)
        run()
        found = out.values.float() * out.scale if fp8 else out.values
        gate, up = x.float().chunk(2, dim=-1)
        return relative_error(found, gated_activation_reference(gate, up, activation))

    plain = compiled(_plain)
    return Prepared(run, {"torch.compile": lambda: plain(x, activation, fp8)}, error)


def _plain(x: Tensor, activation: Activation, fp8: bool) -> Any:
    gate, up = x.chunk(2, dim=-1)
    y = gated_activation_reference(gate, up, activation)
    return quantize_reference(y) if fp8 else y


def tuning() -> Iterator[Tuning]:
    yield Tuning("bfloat16", _CANDIDATES, lambda: _prepare(14336, False, "silu").ours)
    for columns in _WIDTHS:
        yield Tuning(
            key("fp8", columns, torch.bfloat16),
            candidates(columns),
            lambda columns=columns: _prepare(columns, True, "silu").ours,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
