"""The variants of `quantize` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.arguments import short
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.norm.rows import candidates, key, shipped_layouts, width
from cairn.kernels.quantize.quantize import (
    LIMITS,
    THIRDS,
    _dequantize_kernel,
    _quantize_kernel,
    _quantize_thirds_kernel,
    cost,
    quantize,
    quantize_reference,
    quantized_rows,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.quantize.quantize"


def _variant(columns: int, stored: str, rows: int, warps: int, stages: int) -> Variant:
    return Variant(
        f"quantize {columns} {stored}, {rows} rows, {warps} warps, {stages} stages",
        _quantize_kernel,
        {"x": "*bf16", "values": f"*{stored}", "scale": "*fp32", "rows": "i32"}
        | {"x_stride": "i32", "values_stride": "i32"},
        {
            "COLUMNS": columns,
            "WIDTH": width(columns),
            "ROWS": rows,
            "STAGES": stages,
            "OVERLAP": True,
        },
        {"num_warps": warps},
        ("x", "values", "scale", "x_stride", "values_stride"),
    )


VARIANTS = [
    _variant(2048, "fp8e4nv", 1, 2, 1),
    _variant(4096, "fp8e4nv", 1, 4, 1),
    _variant(4096, "fp8e4nv", 1, 4, 3),
    _variant(4096, "i8", 1, 4, 1),
    _variant(8192, "fp8e4nv", 1, 8, 1),
    Variant(
        "quantize 768 fp8e4nv by thirds",
        _quantize_thirds_kernel,
        {"x": "*bf16", "values": "*fp8e4nv", "scale": "*fp32", "rows": "i32"}
        | {"x_stride": "i32", "values_stride": "i32"},
        {"THIRD": 256, "OVERLAP": True, **THIRDS},
        {"num_warps": 4},
        ("x", "values", "scale", "x_stride", "values_stride"),
    ),
    Variant(
        "dequantize 4096",
        _dequantize_kernel,
        {"values": "*fp8e4nv", "scale": "*fp32", "x": "*bf16"}
        | {"scale_stride": "i32", "values_stride": "i32", "x_stride": "i32"},
        {"COLUMNS": 4096, "BLOCK": 2048},
        {"num_warps": 4},
        ("values", "scale", "x", "values_stride", "x_stride"),
    ),
]


def tuned_variants() -> Iterator[Variant]:
    for _, columns, how in shipped_layouts("quantize"):
        for stored in ("fp8e4nv", "i8"):
            yield _variant(columns, stored, how.rows, how.warps, how.stages)


_ROWS = 16384


_WIDTHS = (2048, 4096, 8192)


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        for dtype in LIMITS:
            yield Case(
                f"quantize {short(dtype)}",
                f"{_ROWS} x {columns}",
                "bf16",
                cost(_ROWS, columns),
                functools.partial(_prepare, columns, dtype),
                graph=True,
            )


def _prepare(columns: int, dtype: torch.dtype) -> Prepared:
    x = torch.randn(_ROWS, columns, device="cuda").bfloat16()
    out = quantized_rows(x, dtype, None)

    def error() -> float:
        poison(*out)
        quantize(x, dtype, out, impl="triton")
        return relative_error(out, quantize_reference(x, dtype))

    plain = compiled(quantize_reference)
    return Prepared(
        lambda: quantize(x, dtype, out, impl="triton"),
        {"torch.compile": lambda: plain(x, dtype)},
        error,
    )


def tuning() -> Iterator[Tuning]:
    for columns in _WIDTHS:
        yield Tuning(
            key("rows", columns, torch.bfloat16),
            candidates(columns),
            lambda columns=columns: _prepare(columns, torch.float8_e4m3fn).ours,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
