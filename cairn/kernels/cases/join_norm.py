"""The variants of `join_norm` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.norm.join_norm import (
    Parts,
    _join_norm_kernel,
    _warps,
    cost,
    join_add_rmsnorm,
    join_add_rmsnorm_reference,
)
from cairn.kernels.norm.rmsnorm import add_rmsnorm
from cairn.kernels.norm.rows import width

KERNEL = "cairn.kernels.norm.join_norm"


def _variant(columns: int, parts: int, fp8: bool = False) -> Variant:
    types = dict(parts="*fp32", residual="*bf16", weight="*bf16", y="*bf16", total="*bf16")
    types |= {"y": "*fp8e4nv", "scale": "*fp32"} if fp8 else {}
    numbers = dict.fromkeys(("rows", "residual_stride", "y_stride", "total_stride"), "i32")
    constants: dict[str, Any] = dict(
        PARTS=parts, PLUS_ONE=False, COLUMNS=columns, WIDTH=width(columns), EARLY=True, OVERLAP=True
    ) | ({} if fp8 else {"scale": None})
    return Variant(
        f"join norm {columns}, {parts} parts{', fp8' * fp8}",
        _join_norm_kernel,
        {**types, **numbers, "eps": "fp32"},
        constants,
        {"num_warps": _warps(columns)},
        (*types, "residual_stride", "y_stride", "total_stride"),
    )


VARIANTS = [_variant(1024, 4), _variant(4096, 2), _variant(4096, 2, fp8=True)]


def cases() -> Iterator[Case]:
    for parts, rows, columns in ((4, 64, 1024), (4, 128, 1024), (2, 64, 4096)):
        yield Case("join_norm", f"{parts} parts of {rows} x {columns}", "bf16", cost(parts, rows, columns),
                   lambda s=(parts, rows, columns): _prepare(*s), graph=True)  # fmt: skip


def _prepare(parts: int, rows: int, columns: int) -> Prepared:
    given = Parts(torch.randn(parts, rows, columns, device="cuda"))
    residual = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    total = torch.empty_like(residual)

    def ours() -> Tensor:
        return join_add_rmsnorm(
            given, residual, weight, residual_out=total, prefetch=True, impl="triton"
        )[0]

    def apart() -> Tensor:
        joined = given.sums_SMD.sum(0).to(residual.dtype)
        return add_rmsnorm(joined, residual, weight, residual_out=total)[0]

    def error() -> float:
        poison(total)
        exact, _ = join_add_rmsnorm_reference(
            Parts(given.sums_SMD.double()), residual.double(), weight.double(), 1e-6
        )
        return relative_error(ours(), exact)

    return Prepared(ours, {"sum, then add_rmsnorm": apart}, error)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
