"""The variants of `rmsnorm_backward` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.norm.rmsnorm_backward import (
    Gradients,
    _rmsnorm_backward_kernel,
    cost,
    rmsnorm_backward,
    rmsnorm_backward_reference,
)
from cairn.kernels.norm.rows import SUM_PARTS, Layout, key, summing_layout, width
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.norm.rmsnorm_backward"


def _variant(columns: int, how: Layout, residual: bool = False, again: bool = False) -> Variant:
    types = {"grad": "*bf16", "x": "*bf16", "rstd": "*fp32", "weight": "*bf16", "dx": "*bf16"}
    strides = ["grad_stride", "grad_residual_stride", "x_stride", "dx_stride", "y_stride"]
    there = {"grad_residual": residual, "y": again}
    extra = {name: "*bf16" for name, is_there in there.items() if is_there}
    none: dict[str, None] = {name: None for name, is_there in there.items() if not is_there}
    types |= extra | {"dw_parts": "*fp32", "rows": "i32"} | dict.fromkeys(strides, "i32")
    return Variant(
        f"rmsnorm backward {columns}{' + residual' * residual}{' + y' * again}, {how}",
        _rmsnorm_backward_kernel,
        types,
        {"PLUS_ONE": False, "COLUMNS": columns, "WIDTH": width(columns)}
        | {"ROWS": how.rows, "STAGES": how.stages, **none},
        {"num_warps": how.warps},
        [name for name in types if name != "rows"],
    )


def _candidates(columns: int) -> list[Layout]:
    base = summing_layout(columns)
    double, half = min(2 * base.warps, 32), max(base.warps // 2, 1)
    ideas = [
        base,
        base._replace(stages=2),
        base._replace(stages=1),
        base._replace(warps=half, per_sm=2 * base.per_sm, stages=2),
        base._replace(warps=half, per_sm=base.per_sm, stages=3),
        base._replace(rows=2, stages=2),
        base._replace(warps=double, per_sm=max(base.per_sm // 2, 1), stages=3),
    ]
    return list(dict.fromkeys(ideas))


VARIANTS = [
    _variant(2048, summing_layout(2048)),
    _variant(4096, summing_layout(4096)),
    _variant(4096, summing_layout(4096), residual=True),
    _variant(4096, summing_layout(4096), residual=True, again=True),
    _variant(8192, summing_layout(8192), residual=True),
    SUM_PARTS,
]


_ROWS = 16384


_WIDTHS = (2048, 4096, 8192)


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        for residual in (False, True):
            yield Case(
                "add_rmsnorm backward" if residual else "rmsnorm backward",
                f"{_ROWS} x {columns}",
                "bf16",
                cost(_ROWS, columns, residual=residual),
                functools.partial(_prepare, columns, residual),
                graph=True,
            )


def _prepare(columns: int, residual: bool) -> Prepared:
    x, grad, extra = (torch.randn(_ROWS, columns, device="cuda").bfloat16() for _ in range(3))
    weight = torch.randn(columns, device="cuda").bfloat16()
    rstd = torch.rsqrt(x.float().square().mean(-1) + 1e-6)
    arguments = (grad, x, rstd, weight)
    beside = extra if residual else None

    def run() -> Gradients:
        return rmsnorm_backward(*arguments, grad_residual=beside, impl="triton")

    def error() -> float:
        truth = rmsnorm_backward_reference(
            grad.double(), x.double(), rstd.double(), weight.double(), False, beside
        )
        return relative_error([t for t in run() if t is not None], truth)

    plain = compiled(rmsnorm_backward_reference)
    return Prepared(run, {"torch.compile": lambda: plain(*arguments, False, beside)}, error)


def tuning() -> Iterator[Tuning]:
    for columns in _WIDTHS:
        yield Tuning(
            key("rows", columns, torch.bfloat16),
            [how._asdict() for how in _candidates(columns)],
            lambda columns=columns: _prepare(columns, False).ours,
        )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
