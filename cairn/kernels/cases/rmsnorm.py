"""The variants of `rmsnorm` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.norm.rmsnorm import FP8, _launch, _rmsnorm_kernel, cost, rmsnorm_reference
from cairn.kernels.norm.rows import Layout, candidates, default_layout, key, shipped_layouts, width
from cairn.kernels.quantize.quantize import Quantized, quantize_reference, quantized_rows
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.norm.rmsnorm"


def _variant(
    columns: int,
    how: Layout,
    residual: bool = False,
    fp8: bool = False,
    early: bool = False,
    both: bool = False,
) -> Variant:
    pointers = {"x": "*bf16", "weight": "*bf16", "y": "*fp8e4nv" if fp8 and not both else "*bf16"}
    pointers |= {"beside": "*fp8e4nv"} if both else {}
    pointers |= {"residual": "*bf16", "total": "*bf16"} if residual else {}
    pointers |= {"scale": "*fp32"} if fp8 else {}
    strides = [f"{name}_stride" for name in ("x", "residual", "y", "total")]
    absent = {"residual", "total", "scale", "beside", "rstd"} - set(pointers)
    return Variant(
        f"rmsnorm {columns}{' + residual' * residual}{' + fp8' * fp8}{' beside' * both}{', early' * early}, {how}",
        _rmsnorm_kernel,
        pointers | dict.fromkeys(strides, "i32") | {"rows": "i32", "eps": "fp32"},
        {"PLUS_ONE": False, "COLUMNS": columns, "WIDTH": width(columns), "ROWS": how.rows}
        | {"STAGES": how.stages, "EARLY": early, "OVERLAP": True, **dict.fromkeys(absent)},
        {"num_warps": how.warps},
        [*pointers, *strides],
    )


VARIANTS = [
    *(_variant(columns, default_layout(columns)) for columns in (2048, 4096, 8192)),
    _variant(4096, Layout(1, 8, 3, 4)),
    *(_variant(columns, default_layout(columns), residual=True) for columns in (4096, 8192)),
    *(
        _variant(columns, default_layout(columns), residual=True, early=True)
        for columns in (1024, 4096)
    ),
    _variant(4096, default_layout(4096), fp8=True),
    _variant(4096, default_layout(4096), residual=True, fp8=True),
    _variant(2048, default_layout(2048), residual=True, fp8=True, both=True),
]


def tuned_variants() -> Iterator[Variant]:
    for form, columns, how in shipped_layouts("rmsnorm"):
        yield _variant(columns, how, form.startswith("add"), form.endswith("fp8"))


_ROWS = 16384


_WIDTHS = (2048, 4096, 8192)


def cases() -> Iterator[Case]:
    for columns in _WIDTHS:
        for residual, fp8 in ((False, False), (True, False), (False, True), (True, True)):
            yield Case(
                f"{'add_' * residual}rmsnorm{'_fp8' * fp8}",
                f"{_ROWS} x {columns}",
                "bf16",
                cost(_ROWS, columns, residual=residual, fp8=fp8),
                functools.partial(_prepare, columns, residual, fp8),
                tolerance=5e-2 if fp8 else 1e-2,
                graph=True,
            )


def _prepare(columns: int, residual: bool, fp8: bool) -> Prepared:
    x, before = (torch.randn(_ROWS, columns, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(columns, device="cuda").bfloat16()
    y, total = quantized_rows(x, FP8, None), torch.empty_like(x)
    y = y if fp8 else Quantized(torch.empty_like(x), y.scale)
    added = before if residual else None
    scale, after = y.scale if fp8 else None, total if residual else None

    def run() -> None:
        _launch(x, added, weight, y.values, after, scale, None, 1e-6, False)

    def error() -> float:
        poison(*y, total)
        run()
        found = y.values.float() * y.scale if fp8 else y.values
        summed = x + before if residual else x
        truth = rmsnorm_reference(summed.double(), weight.double(), 1e-6)
        return max(relative_error(found, truth), relative_error(total, summed) * residual)

    plain = compiled(_plain)
    return Prepared(run, {"torch.compile": lambda: plain(x, weight, added, fp8)}, error)


def _plain(x: Tensor, weight: Tensor, added: Tensor | None, fp8: bool) -> Any:
    total = x if added is None else x + added
    normed = F.rms_norm(total, weight.shape, weight, 1e-6)
    return quantize_reference(normed) if fp8 else normed, total if added is not None else None


def tuning() -> Iterator[Tuning]:
    for columns in _WIDTHS:
        for form in ("plain", "add", "plain,fp8", "add,fp8"):
            prepare = functools.partial(_prepare, columns, "add" in form, "fp8" in form)
            yield Tuning(
                key(form, columns, torch.bfloat16),
                candidates(columns),
                lambda prepare=prepare: prepare().ours,
            )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
