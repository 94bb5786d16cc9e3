"""The variants of `weight_only` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

from cairn.kernels.accuracy import relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.projections import QWEN3_8B
from cairn.kernels.matmul.weight_only import (
    E4M3,
    NIBBLES,
    OF_LEVELS,
    STAGES,
    TILE,
    WARPS,
    PackedRows,
    _dequantize_kernel,
    constants_of,
    cost,
    pack_nibbles,
    parts_of,
    row_block,
    rows_reference,
    span_of,
    weight_only_kernel,
    weight_only_matmul,
)

KERNEL = "cairn.kernels.matmul.weight_only"
BATCHES = (1, 16, 64)
PROJECTIONS = (QWEN3_8B[0], QWEN3_8B[2])
POINTER = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    E4M3: "*fp8e4nv",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
}


class Form(NamedTuple):
    """A published form of weights."""

    name: str
    kind: str
    group: int  # 0: a scale for each row
    scales: torch.dtype
    shifts: bool = False
    factor: bool = False

    @property
    def bits(self) -> float:
        """Bits per weight including scales and shifts."""
        each = self.scales.itemsize * (1 + self.shifts) * 8 / self.group if self.group else 0.0
        return (4 if self.kind in NIBBLES else 8) + each


FORMS = (
    Form("int8 rows", "int8", 0, torch.float32, factor=True),
    Form("int4 in 32", "int4", 32, torch.bfloat16),
    Form("mxfp4", "e2m1", 32, torch.bfloat16),
    Form("nvfp4", "e2m1", 16, E4M3, factor=True),
)
OTHERS = (
    Form("int8 in 128", "int8", 128, torch.bfloat16),
    Form("int4 in 32, shifts", "int4", 32, torch.float32, shifts=True),
    Form("int4 in 128, shifts", "int4", 128, torch.float32, shifts=True),
    Form("fp8 in 64", "fp8", 64, torch.float32),
)


def random_rows(
    form: Form, n: int, k: int, device: str = "cuda", whole: bool = False
) -> PackedRows:
    """Weights of about the size that a model has; `whole`: of which sums are exact in any order."""
    high = {"int4": 16, "e2m1": 16}.get(form.kind)
    if high is not None:
        levels = torch.randint(0, high, (n, k), dtype=torch.uint8, device=device)
    else:
        most = 3 if whole else 100
        levels = torch.randint(-most, most + 1, (n, k), device=device).to(OF_LEVELS[form.kind])
    group = form.group or k
    span = span_of(k, group, form.kind in NIBBLES)
    assert span is not None
    scales = shifts = factor = None

    def plane(*shape: int) -> torch.Tensor:
        if whole:
            return 2.0 ** torch.randint(0, 2, shape, device=device)
        return (0.5 + torch.rand(*shape, device=device)) * 0.1 * k**-0.5

    if form.group:
        grown = plane(n, k // group) * (1 if whole or form.scales != E4M3 else 1000)
        scales = grown.to(form.scales)
    if form.shifts:
        shifts = plane(n, k // group).to(form.scales)
    if form.factor:
        factor = plane(n)
    values = pack_nibbles(levels, span) if form.kind in NIBBLES else levels
    return PackedRows(form.kind, values, span, scales, shifts, factor)


def _variants(form: Form, m: int, n: int, k: int) -> Iterator[Variant]:
    """The product, with and without a cut of K, and the matrix in floating point."""
    w = random_rows(form, TILE, k, "cpu")
    planes = dict(scales=w.scales_NG, shifts=w.shifts_NG, factor=w.factor_N)
    of_weight = {"values": POINTER[w.values.dtype]}
    of_weight |= {name: POINTER[t.dtype] for name, t in planes.items() if t is not None}
    none = {name: None for name, plane in planes.items() if plane is None}
    sizes = dict.fromkeys(("stride_x", "stride_y", "M", "N", "K"), "i32")
    for split in sorted({1, parts_of(m, n, k)}):
        pointers = {"x": "*bf16", **of_weight, "y": "*bf16"} | (
            {"parts": "*fp32"} if split > 1 else {}
        )
        constants: dict[str, Any] = {**none, "bias": None, **({} if split > 1 else {"parts": None})}
        constants |= constants_of(w) | dict(SPLIT=split, BN=TILE, BM=row_block(m))
        yield Variant(
            f"{form.name}, {m} rows, {split} parts",
            weight_only_kernel,
            _in_order(weight_only_kernel, {**pointers, **sizes}),
            _in_order(weight_only_kernel, constants),
            {"num_warps": WARPS, "num_stages": STAGES},
            (*pointers, "stride_x", "stride_y", "N", "K"),
            "mma",
        )
    pointers = {**of_weight, "y": "*bf16"}
    yield Variant(
        f"{form.name}, dequantise",
        _dequantize_kernel,
        _in_order(_dequantize_kernel, {**pointers, "N": "i32", "K": "i32"}),
        _in_order(_dequantize_kernel, {**none, **constants_of(w), "BN": TILE}),
        {"num_warps": WARPS},
        (*pointers, "N", "K"),
    )


def _in_order(kernel: Any, named: dict[str, Any]) -> dict[str, Any]:
    return {name: named[name] for name in cast(Any, kernel).arg_names if name in named}


VARIANTS = list(
    {
        variant.name: variant
        for form in (*FORMS, *OTHERS)
        for m in ((1, 64) if form in FORMS else (1,))
        for variant in _variants(form, m, 4096, 4096)
    }.values()
)


def cases() -> Iterator[Case]:
    """Levels of 8 bits, at shapes that an engine gives to `packed_matmul`: what the kernel for any shape costs."""
    for form in (FORMS[0], OTHERS[-1]):
        for p in PROJECTIONS:
            for m in BATCHES:
                yield Case(
                    "weight_only",
                    f"{form.name}, {m} x {p.n} x {p.k} ({p.model} {p.name})",
                    "bf16",
                    cost(m, p.n, p.k, form.bits),
                    lambda s=(form, m, p.n, p.k): _prepare(*s),
                    graph=True,
                )


def _prepare(form: Form, m: int, n: int, k: int) -> Prepared:
    x_MK, w = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), random_rows(form, n, k)
    wide_NK = rows_reference(w, torch.bfloat16)

    def error() -> float:
        exact = x_MK.double() @ rows_reference(w).double().T
        return relative_error(weight_only_matmul(x_MK, w, impl="triton"), exact)

    return Prepared(
        lambda: weight_only_matmul(x_MK, w, impl="triton"),
        {"cuBLAS, bf16": lambda: F.linear(x_MK, wide_NK)},
        error,
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
