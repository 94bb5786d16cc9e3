"""The variants of `activation` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.activation import (
    Activation,
    _gated_fp8_kernel,
    _gated_kernel,
    _launch,
    _launch_fp8,
    cost,
    gated_activation_reference,
)
from cairn.kernels.layer.activation_backward import KINDS
from cairn.kernels.norm.rows import Layout, candidates, default_layout, key, shipped_layouts, width
from cairn.kernels.quantize.quantize import Quantized, quantize_reference, quantized_rows
from cairn.kernels.tuned import Tuning, shipped

KERNEL = "cairn.kernels.layer.activation"


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
        | {"ROWS": how.rows, "STAGES": how.stages, "OVERLAP": True},
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
