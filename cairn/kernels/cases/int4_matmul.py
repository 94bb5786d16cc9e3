"""The variants of `int4_matmul` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention_rings import described
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.int4_matmul import (
    ROW_BYTES,
    WARP_ROWS,
    cost,
    int4_matmul,
    int4_plan,
    registers_of,
    row_block,
    stage_bytes,
    stages_of,
    unit_of,
    uses_wgmma,
)
from cairn.kernels.matmul.int4_stream import int4_kernel
from cairn.kernels.matmul.int4_tiles import TILE, TILE_BYTES
from cairn.kernels.matmul.int4_weights import (
    Int4,
    _dequantize_kernel,
    counted,
    int4_reference,
    int4_weights,
)
from cairn.kernels.matmul.projections import QWEN3_8B
from cairn.kernels.matmul.skinny_plans import Plan
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.matmul.int4_matmul"
GROUP = 128
BATCHES = (1, 16, 64)
PROJECTIONS = QWEN3_8B[:4]
WIDE = (QWEN3_8B[0], QWEN3_8B[2])


class Form(NamedTuple):
    """How 4 bits are meant."""

    name: str
    kind: str = "int4"
    group: int = GROUP
    shifts: bool = False
    factor: bool = False

    @property
    def bits(self) -> float:
        """Of a weight, with its share of scales and shifts."""
        number = 16 if self.group < TILE or not self.shifts else 32
        return 4 + number * (1 + self.shifts) / self.group


INT4 = Form("int4 in 128")
SHIFTED = Form("int4 in 64, shifts", group=64, shifts=True)
SMALL = (
    Form("int4 in 32", group=32),
    Form("int4 in 32, shifts", group=32, shifts=True),
    Form("mxfp4", "e2m1", 32),
    Form("nvfp4", "e2m1", 16, factor=True),
)


def _variant(
    plan: Plan,
    m: int,
    k: int,
    form: Form = INT4,
    swiglu: bool = False,
    joins: bool = True,
) -> Variant:
    split, kernel = plan.parts(k), cast(Any, int4_kernel)
    group, shifts, unit = form.group, form.shifts, unit_of(plan.block_k, form.group)
    numbers = described([1, TILE], torch.float32 if shifts else torch.bfloat16)
    if group < TILE:
        numbers = described([unit // group, ROW_BYTES], torch.int8)
    tiles = {
        "x": described([row_block(m), unit]),
        "w": described([unit // 4, ROW_BYTES], torch.int8),
    }
    joins = joins and split > 1
    pointers = {"factor": "*fp32"} if form.factor else {}
    pointers |= {"y": "*bf16"} | ({"parts": "*fp32"} if split > 1 else {})
    pointers |= {"arrived": "*i32"} if joins else {}
    types = {**tiles, "scales": numbers, **({"shifts": numbers} if shifts else {}), **pointers}
    types |= dict.fromkeys(("stride_y", "M", "N", "K"), "i32")
    constants: dict[str, Any] = dict(
        bias=None, KIND=form.kind, GROUP=group, UNITS=plan.block_k // unit, SPLIT=split
    )
    registers = registers_of(m, plan)
    constants |= dict(GROUPS=plan.warps // 4, REGISTERS=registers.multiplying)
    constants |= dict(WGMMA=uses_wgmma(m, plan), **({} if joins else {"arrived": None}))
    constants |= dict(STAGES=stages_of(plan), SWIGLU=swiglu, OVERLAP=True)
    constants |= {"EARLY": True, **({} if split > 1 else {"parts": None})}
    constants |= {} if shifts else {"shifts": None}
    constants |= {} if form.factor else {"factor": None}
    more = f"{', swiglu' * swiglu}{', joins' * joins}"
    return Variant(
        f"{plan.kernel} {m} x {plan.block_n} x {plan.block_k}, {form.name}, {split} parts, {plan.stages} stages, "
        f"{plan.warps} warps{more}",
        int4_kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: constants[name] for name in kernel.arg_names if name in constants},
        {"num_warps": 4, "maxnreg": registers.average},
        (*pointers, "stride_y", "N", "K"),
        "wgmma" if uses_wgmma(m, plan) else "mma",
        gluon=True,
    )


_SHIPPED = [
    *(_variant(int4_plan(m, p.n, p.k, GROUP), m, p.k) for p in PROJECTIONS for m in BATCHES),
    *(
        _variant(int4_plan(m, 4096, 4096, form.group, form.shifts), m, 4096, form)
        for form in SMALL
        for m in (8, 64)
    ),
    _variant(int4_plan(8, 24576, 4096, GROUP), 8, 4096, swiglu=True),
    _variant(Plan("int4 warps", TILE, 256, 4, 4, 4), 8, 4096),
    _variant(Plan("int4 warps", TILE, 256, 4, 4, 4), 8, 4096, SMALL[-1]),
    _variant(Plan("int4 warps", TILE, 256, 2, 4, 3), 16, 4096, SHIFTED, swiglu=True),
    _variant(int4_plan(8, 4096, 4096, GROUP), 8, 4096, joins=False),
    _variant(int4_plan(8, 6144, 4096, GROUP)._replace(split=1, warps=8, stages=8), 8, 4096),
    _variant(int4_plan(8, 24576, 4096, 64, True), 8, 4096, SHIFTED),
    Variant(
        "int4 dequantise",
        _dequantize_kernel,
        {
            "tiles": "*u8",
            "scales": "*fp32",
            "shifts": "*fp32",
            "y": "*bf16",
            "N": "i32",
            "K": "i32",
        },
        {
            "factor": None,
            "KIND": "int4",
            "GROUP": GROUP,
            "TILE": TILE,
            "BYTES": TILE_BYTES,
            "PAIRED": True,
        },
        {"num_warps": 4},
        ("tiles", "scales", "shifts", "y", "N", "K"),
    ),
]
VARIANTS = list({variant.name: variant for variant in _SHIPPED}.values())


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("int4_matmul"):
        numbers = numbers_of(entry)
        yield _variant(
            Plan(**how), numbers["m"], numbers["k"], INT4._replace(group=numbers["group"])
        )


def random_int4(
    n: int, k: int, group: int = GROUP, shifts: bool = False, device: str = "cuda"
) -> Int4:
    return random_weights(INT4._replace(group=group, shifts=shifts), n, k, device)


def random_weights(form: Form, n: int, k: int, device: str = "cuda", whole: bool = False) -> Int4:
    """Weights of about the size that a model has; `whole`: of which sums are exact in any order."""
    levels_NK = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    shape = (n, k // form.group)
    scales_NG = (0.5 + torch.rand(shape, device=device)) * 0.2 * k**-0.5
    shifts_NG = torch.randn_like(scales_NG) * scales_NG if form.shifts else None
    if form.group < TILE:  # what the kernel has of other numbers
        scales_NG = scales_NG.bfloat16().float()
        shifts_NG = None if shifts_NG is None else shifts_NG.bfloat16().float()
    elif not form.shifts:
        scales_NG = scales_NG.bfloat16()
    factor_N = 0.5 + torch.rand(n, device=device) if form.factor else None
    if whole:
        scales_NG = 2.0 ** torch.randint(-1, 2, shape, device=device)
        shifts_NG = torch.randint(-2, 3, shape, device=device).float() if form.shifts else None
        factor_N = 2.0 ** torch.randint(-1, 2, (n,), device=device) if form.factor else None
    return int4_weights(levels_NK, scales_NG, shifts_NG, form.kind, factor_N)


def cases() -> Iterator[Case]:
    for form, projections in ((INT4, PROJECTIONS), *((form, WIDE) for form in SMALL)):
        for p in projections:
            for m in BATCHES:
                shape = f"{m} x {p.n} x {p.k} ({p.model} {p.name})"
                shape = shape if form is INT4 else f"{form.name}, {shape}"
                prepare = lambda s=(form, m, p.n, p.k): _prepare(*s)  # noqa: E731
                bytes_ = cost(m, p.n, p.k, form.bits)
                yield Case("int4_matmul", shape, "bf16", bytes_, prepare, graph=True)


def _prepare(form: Form, m: int, n: int, k: int) -> Prepared:
    x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = counted(random_weights(form, n, k))
    wide_NK = int4_reference(w, torch.bfloat16)

    def error() -> float:
        exact = x_MK.double() @ int4_reference(w).double().T
        return relative_error(int4_matmul(x_MK, w, prefetch=True, impl="gluon"), exact)

    return Prepared(
        lambda: int4_matmul(x_MK, w, prefetch=True, impl="gluon"),
        {"cuBLAS, bf16": lambda: F.linear(x_MK, wide_NK)},
        error,
    )


def plans(m: int, n: int, k: int, group: int = GROUP) -> list[Plan]:
    """Around the default: more and fewer parts, one warpgroup or two, wider and narrower steps, and rings."""
    default, found = int4_plan(m, n, k, group), []
    kinds = ("int4", "int4 warps") if row_block(m) <= WARP_ROWS else ("int4",)
    for split, warps, width in product((1, 2, 4, 8, 16), (4, 8), (128, 256, 512)):
        groups = n // TILE * split * warps // 4
        if k % width or not 190 <= groups <= 1600 or k < split * 512:
            continue
        for kib in (40, 54, 72) if warps == 4 else (72, 108):
            most = min((kib << 10) // stage_bytes(m, width, group), 16, k // (width * split))
            if most >= 2:
                found += [Plan(kind, TILE, width, split, warps, most) for kind in kinds]
    return list(dict.fromkeys([default, *found]))


def tuning() -> Iterator[Tuning]:
    for p in PROJECTIONS:
        for m in BATCHES:

            def prepare(m: int = m, n: int = p.n, k: int = p.k) -> Callable[[], Tensor]:
                x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
                w = counted(random_int4(n, k))
                return lambda: int4_matmul(x_MK, w, prefetch=True)

            key = f"m={row_block(m)},n={p.n},k={p.k},group={GROUP}"
            yield Tuning(key, [plan._asdict() for plan in plans(m, p.n, p.k)], prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
