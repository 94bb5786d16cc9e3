"""The variants of `activation_backward` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.activation_backward import (
    KINDS,
    _gated_backward_kernel,
    cost,
    gated_activation_backward,
    gated_activation_backward_reference,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.layer.activation_backward"


def _variant(kind: str, block: int, warps: int, again: bool = False) -> Variant:
    names = ("grad", "gate", "up", "d_gate", "d_up", "y")
    pointers = dict.fromkeys(names if again else names[:-1], "*bf16")
    strides = [f"{name}_stride" for name in names]
    return Variant(
        f"{kind} gate backward, block {block}, {warps} warps{', y again' * again}",
        _gated_backward_kernel,
        pointers | dict.fromkeys(strides, "i32"),
        {"KIND": KINDS[kind], "COLUMNS": 14336, "BLOCK": block} | ({} if again else {"y": None}),
        {"num_warps": warps},
        [*pointers, *strides],
    )


_CANDIDATES = [{"block": b, "warps": w} for b, w in
               ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 4))]  # fmt: skip


VARIANTS = [
    _variant("silu", 2048, 4),
    _variant("silu", 2048, 4, again=True),
    _variant("gelu_tanh", 2048, 4),
    _variant("gelu", 2048, 4),
]


_ROWS = 16384


_WIDTHS = (3072, 12288, 14336)


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        yield Case(
            "swiglu backward",
            f"{_ROWS} x {columns}",
            "bf16",
            cost(_ROWS, columns),
            functools.partial(_prepare, columns),
        )


def _prepare(columns: int) -> Prepared:
    x = torch.randn(_ROWS, 2 * columns, device="cuda").bfloat16()
    grad = torch.randn(_ROWS, columns, device="cuda").bfloat16()

    def run() -> Tensor:
        return gated_activation_backward(grad, x, impl="triton")[0]

    plain = compiled(_plain)
    anchors = {"torch.compile": lambda: plain(grad, x)}
    return Prepared(run, anchors, lambda: relative_error(run(), _plain(grad.float(), x.float())))


def _plain(grad: Tensor, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.cat(gated_activation_backward_reference(grad, gate, up, "silu"), dim=-1)


def tuning() -> Iterator[Tuning]:
    yield Tuning("bfloat16", _CANDIDATES, lambda: _prepare(14336).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
