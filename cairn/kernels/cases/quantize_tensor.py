"""The variants of `quantize_tensor` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.quantize.quantize_tensor import (
    DEFAULT,
    _quantize_tensor_kernel,
    _tensor_output,
    cost,
    largest_kernel,
    quantize_tensor,
    quantize_tensor_reference,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.quantize.quantize_tensor"


_TYPES = {"x": "*bf16", "values": "*fp8e4nv", "scale": "*fp32", "largest": "*fp32"}


VARIANTS = [
    Variant(
        "largest",
        largest_kernel,
        {"x": "*bf16", "largest": "*fp32", "elements": "i64"},
        {"BLOCK": 8192, "STAGES": 1},
        {"num_warps": 8},
        ("x", "largest", "elements"),
    ),
    Variant(
        "quantize tensor",
        _quantize_tensor_kernel,
        _TYPES | {"elements": "i64", "parts": "i32"},
        {"PARTS": 1024, "BLOCK": 8192, "STAGES": 1},
        {"num_warps": 8},
        ("x", "values", "scale", "largest", "elements"),
    ),
]


_ROWS, _COLUMNS = 16384, 4096


def cases() -> Iterator[Case]:
    yield Case(
        "quantize tensor fp8",
        f"{_ROWS} x {_COLUMNS}",
        "bf16",
        cost(_ROWS * _COLUMNS, dynamic=True),
        _prepare,
    )


def _prepare() -> Prepared:
    x = torch.randn(_ROWS, _COLUMNS, device="cuda").bfloat16()
    out = _tensor_output(x, None, None)

    def error() -> float:
        poison(*out)
        quantize_tensor(x, out=out, impl="triton")
        return relative_error(out, quantize_tensor_reference(x))

    plain = compiled(quantize_tensor_reference)
    return Prepared(
        lambda: quantize_tensor(x, out=out, impl="triton"),
        {"torch.compile": lambda: plain(x)},
        error,
    )


def tuning() -> Iterator[Tuning]:
    tensor = [DEFAULT | {"block": block, "warps": block // 1024, "stages": stages}
              for block in (4096, 8192, 16384) for stages in (1, 3)]  # fmt: skip
    yield Tuning("bfloat16", tensor, lambda: _prepare().ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
