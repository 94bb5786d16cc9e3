"""The variants of `layernorm` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.norm.layernorm import (
    _launch_backward,
    _layernorm_backward_kernel,
    _layernorm_kernel,
    cost,
    layernorm,
    layernorm_reference,
)
from cairn.kernels.norm.rows import (
    Layout,
    candidates,
    default_layout,
    key,
    shipped_layouts,
    summing_layout,
    width,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.norm.layernorm"


def _variant(columns: int, how: Layout, backward: bool, added: bool = False) -> Variant:
    if backward:
        pointers = dict.fromkeys(("grad", "x", "weight", "dx"), "*bf16")
        pointers |= dict.fromkeys(("mean", "rstd", "parts"), "*fp32")
        strides, absent, scalars = ("grad_stride", "x_stride", "dx_stride"), (), {}
    else:
        pointers = dict.fromkeys(("x", "weight", "bias", "y"), "*bf16")
        strides = ("x_stride", "residual_stride", "y_stride", "total_stride")
        absent, scalars = ("mean", "rstd"), {"eps": "fp32"}
        if added:
            pointers |= dict.fromkeys(("residual", "total"), "*bf16")
        else:
            absent = (*absent, "residual", "total")
    return Variant(
        f"{'add_' * added}layernorm {'backward ' * backward}{columns}, {how}",
        _layernorm_backward_kernel if backward else _layernorm_kernel,
        pointers | dict.fromkeys(strides, "i32") | {"rows": "i32"} | scalars,
        {"COLUMNS": columns, "WIDTH": width(columns), "ROWS": how.rows, "STAGES": how.stages}
        | ({"BIAS": True} if backward else dict.fromkeys(absent)),
        {"num_warps": how.warps},
        [*pointers, *strides],
    )


_ROWS = 16384


_WIDTHS = (2048, 4096, 8192)


VARIANTS = [
    *(_variant(columns, default_layout(columns), backward=False) for columns in _WIDTHS),
    _variant(1152, default_layout(1152), backward=False, added=True),
    *(_variant(columns, summing_layout(columns), backward=True) for columns in _WIDTHS),
]


def tuned_variants() -> Iterator[Variant]:
    for form, columns, how in shipped_layouts("layernorm"):
        yield _variant(columns, how, form == "backward")


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        for backward in (False, True):
            yield Case(
                f"layernorm{' backward' * backward}",
                f"{_ROWS} x {columns}",
                "bf16",
                cost(_ROWS, columns, backward=backward),
                functools.partial(_prepare_backward if backward else _prepare, columns),
                graph=True,
            )


def _prepare(columns: int) -> Prepared:
    x = torch.randn(_ROWS, columns, device="cuda").bfloat16()
    weight, bias = torch.randn(2, columns, device="cuda").bfloat16()
    out = torch.empty_like(x)

    def error() -> float:
        poison(out)
        layernorm(x, weight, bias, out=out, impl="triton")
        return relative_error(out, layernorm_reference(x.double(), weight, bias, 1e-5))

    plain = compiled(F.layer_norm)
    anchors = {
        "torch": lambda: F.layer_norm(x, (columns,), weight, bias),
        "torch.compile": lambda: plain(x, (columns,), weight, bias),
    }
    return Prepared(lambda: layernorm(x, weight, bias, out=out, impl="triton"), anchors, error)


def _prepare_backward(columns: int) -> Prepared:
    x, grad = torch.randn(2, _ROWS, columns, device="cuda").bfloat16()
    weight, bias = torch.randn(2, columns, device="cuda").bfloat16()
    _, mean, rstd = torch.native_layer_norm(x, (columns,), weight, bias, 1e-5)
    saved = (mean.flatten(), rstd.flatten())

    def run() -> Any:
        return _launch_backward(grad, x, weight, *saved, torch.bfloat16)

    def error() -> float:
        leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
        exact = layernorm_reference(leaves[0], leaves[1], leaves[2], 1e-5)
        return relative_error(run(), torch.autograd.grad(exact, leaves, grad.double()))

    anchors = {
        "torch": lambda: torch.ops.aten.native_layer_norm_backward(
            grad, x, (columns,), mean, rstd, weight, bias, [True, True, True]
        )
    }
    return Prepared(run, anchors, error)


def tuning() -> Iterator[Tuning]:
    for columns in _WIDTHS:
        yield Tuning(
            key("forward", columns, torch.bfloat16),
            candidates(columns),
            lambda columns=columns: _prepare(columns).ours,
        )
        base = summing_layout(columns)
        ideas = [base, base._replace(stages=2), base._replace(stages=1), base._replace(rows=2)]
        yield Tuning(
            key("backward", columns, torch.bfloat16),
            [idea._asdict() for idea in ideas],
            lambda columns=columns: _prepare_backward(columns).ours,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
