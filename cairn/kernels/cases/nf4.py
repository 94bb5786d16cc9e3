"""The variant of `nf4` that is compiled and the shape at which it is measured."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.quantize.nf4 import (
    BLOCK,
    PROGRAM,
    SCALES,
    WARPS,
    _dequantize_kernel,
    cost,
    dequantize_nf4,
    dequantize_nf4_reference,
    quantize_nf4,
)

KERNEL = "cairn.kernels.quantize.nf4"
ROWS, COLUMNS = 24576, 4096  # gate and up of an 8B model
POINTERS = dict(packed="*u8", scales="*u8", scale_of_scales="*fp32", mean="*fp32", levels="*fp32")
POINTERS |= dict(map_of_scales="*fp32", out="*bf16")

VARIANTS = [
    Variant(
        "dequantize nf4",
        _dequantize_kernel,
        {**POINTERS, "count": "i32"},
        {"BLOCKS": PROGRAM, "BLOCK": BLOCK, "SCALES": SCALES, "EVEN": True},
        {"num_warps": WARPS, "enable_fp_fusion": False},
        tuple(POINTERS),
    )
]


def cases() -> Iterator[Case]:
    yield Case("nf4", f"{ROWS} x {COLUMNS}", "bf16", cost(ROWS * COLUMNS), _prepare)


def _prepare() -> Prepared:
    packed = quantize_nf4(torch.randn(ROWS, COLUMNS, device="cuda"))
    exact = dequantize_nf4_reference(packed, torch.bfloat16)
    plain = compiled(dequantize_nf4_reference)
    return Prepared(
        lambda: dequantize_nf4(packed, torch.bfloat16, impl="triton"),
        {"torch.compile": lambda: plain(packed, torch.bfloat16)},
        lambda: relative_error(dequantize_nf4(packed, torch.bfloat16, impl="triton"), exact),
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
