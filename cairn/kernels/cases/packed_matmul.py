"""The variants of `packed_matmul` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention_rings import described
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.packed_matmul import (
    ROW_BYTES,
    WARP_ROWS,
    cost,
    packed_matmul,
    packed_plan,
    registers_of,
    row_block,
    stage_bytes,
    stages_of,
    tile_rows,
    tuning_key,
    unit_of,
    uses_wgmma,
)
from cairn.kernels.matmul.packed_stream import packed_kernel
from cairn.kernels.matmul.packed_weights import (
    BITS,
    E4M3,
    PackedWeights,
    _dequantize_kernel,
    counted,
    packed_reference,
    packed_weights,
)
from cairn.kernels.matmul.projections import QWEN3_8B
from cairn.kernels.matmul.skinny_plans import Plan
from cairn.kernels.matmul.tile_order import TILE
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.matmul.packed_matmul"
GROUP = 128
BATCHES = (1, 16, 64)
PROJECTIONS = QWEN3_8B[:4]
WIDE = (QWEN3_8B[0], QWEN3_8B[2])


class Form(NamedTuple):
    """Weight format."""

    name: str
    kind: str = "int4"
    group: int = GROUP  # columns; 0: all
    shifts: bool = False
    factor: bool = False

    def of(self, columns: int) -> "Form":
        """The format with its group size in columns."""
        return self._replace(group=self.group or columns)

    @property
    def bits(self) -> float:
        """Bits per weight including scales and shifts."""
        number = 16 if self.group < TILE or not self.shifts else 32
        return BITS[self.kind] + number * (1 + self.shifts) / self.group


INT4 = Form("int4 in 128")
SHIFTED = Form("int4 in 64, shifts", group=64, shifts=True)
SMALL = (
    Form("int4 in 32", group=32),
    Form("int4 in 32, shifts", group=32, shifts=True),
    Form("mxfp4", "e2m1", 32),
    Form("nvfp4", "e2m1", 16, factor=True),
)
BYTES = (
    Form("int8 rows", "int8", 0),
    Form("int8 in 16", "int8", 16),
    Form("fp8 in 128", "fp8", 128),
)
MORE_BYTES = (
    Form("int8 in 32, shifts", "int8", 32, shifts=True),
    Form("int8 in 64, shifts", "int8", 64, shifts=True),
    Form("fp8 in 32", "fp8", 32, factor=True),
)


def usual_plan(form: Form, m: int, n: int, k: int) -> Plan:
    form = form.of(k)
    return packed_plan(m, n, k, form.group, form.shifts, BITS[form.kind])


def _variant(
    plan: Plan,
    m: int,
    k: int,
    form: Form = INT4,
    swiglu: bool = False,
    joins: bool = True,
) -> Variant:
    split, kernel, form = plan.parts(k), cast(Any, packed_kernel), form.of(k)
    group, shifts, unit = form.group, form.shifts, unit_of(plan.block_k, form.group)
    numbers = described([1, TILE], torch.float32 if shifts else torch.bfloat16)
    if group < TILE:
        numbers = described([unit // group, ROW_BYTES], torch.int8)
    tiles = {
        "x": described([row_block(m), unit]),
        "w": described([tile_rows(unit, BITS[form.kind]), ROW_BYTES], torch.int8),
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
        packed_kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: constants[name] for name in kernel.arg_names if name in constants},
        {"num_warps": 4, "maxnreg": registers.average},
        (*pointers, "stride_y", "N", "K"),
        "wgmma" if uses_wgmma(m, plan) else "mma",
        gluon=True,
    )


_SHIPPED = [
    *(_variant(packed_plan(m, p.n, p.k, GROUP), m, p.k) for p in PROJECTIONS for m in BATCHES),
    *(
        _variant(usual_plan(form, m, 4096, 4096), m, 4096, form)
        for form in (*SMALL, *BYTES, *MORE_BYTES)
        for m in (8, 64)
    ),
    _variant(packed_plan(8, 24576, 4096, GROUP), 8, 4096, swiglu=True),
    _variant(Plan("packed warps", TILE, 256, 4, 4, 4), 8, 4096),
    _variant(Plan("packed warps", TILE, 256, 4, 4, 4), 8, 4096, SMALL[-1]),
    _variant(Plan("packed warps", TILE, 256, 4, 4, 2), 8, 4096, BYTES[0]),
    _variant(Plan("packed warps", TILE, 256, 4, 4, 2), 8, 4096, BYTES[1]),
    _variant(Plan("packed warps", TILE, 256, 2, 4, 3), 16, 4096, SHIFTED, swiglu=True),
    _variant(packed_plan(8, 4096, 4096, GROUP), 8, 4096, joins=False),
    _variant(packed_plan(8, 6144, 4096, GROUP)._replace(split=1, warps=8, stages=8), 8, 4096),
    _variant(packed_plan(8, 24576, 4096, 64, True), 8, 4096, SHIFTED),
    *(
        Variant(
            f"dequantise {kind}",
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
                "KIND": kind,
                "BITS": BITS[kind],
                "GROUP": GROUP,
                "TILE": TILE,
                "PAIRED": True,
            },
            {"num_warps": 4},
            ("tiles", "scales", "shifts", "y", "N", "K"),
        )
        for kind in ("int4", "int8", "fp8")
    ),
]
VARIANTS = list({variant.name: variant for variant in _SHIPPED}.values())


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("packed_matmul"):
        numbers = numbers_of(entry)
        form = INT4._replace(group=numbers["group"])
        yield _variant(Plan(**how), numbers["m"], numbers["k"], form)


def random_packed(
    n: int, k: int, group: int = GROUP, shifts: bool = False, device: str = "cuda"
) -> PackedWeights:
    return random_weights(INT4._replace(group=group, shifts=shifts), n, k, device)


def random_weights(
    form: Form, n: int, k: int, device: str = "cuda", whole: bool = False
) -> PackedWeights:
    """Weights of about the size that a model has; `whole`: of which sums are exact in any order."""
    form, bits = form.of(k), BITS[form.kind]
    levels_NK = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=device)
    if form.kind == "fp8":  # but no NaN; half of the range is 0 to 2
        levels_NK = torch.where(levels_NK % 128 == 127, 0, levels_NK)
    size = {"int8": 0.02, "fp8": 0.02}.get(form.kind, 0.2)  # of a level
    shape = (n, k // form.group)
    scales_NG = (0.5 + torch.rand(shape, device=device)) * size * k**-0.5
    shifts_NG = torch.randn_like(scales_NG) * scales_NG if form.shifts else None
    if form.group < TILE:  # what the kernel has of other numbers
        scales_NG = scales_NG.bfloat16().float()
        shifts_NG = None if shifts_NG is None else shifts_NG.bfloat16().float()
    elif not form.shifts:
        scales_NG = scales_NG.bfloat16()
    factor_N = 0.5 + torch.rand(n, device=device) if form.factor else None
    if whole:
        if bits == 8:
            few = torch.randint(-8, 9, (n, k), device=device)
            levels_NK = few.to(E4M3 if form.kind == "fp8" else torch.int8)
        scales_NG = 2.0 ** torch.randint(-1, 2, shape, device=device)
        shifts_NG = torch.randint(-2, 3, shape, device=device).float() if form.shifts else None
        factor_N = 2.0 ** torch.randint(-1, 2, (n,), device=device) if form.factor else None
    return packed_weights(levels_NK, scales_NG, shifts_NG, form.kind, factor_N)


def cases() -> Iterator[Case]:
    for form, projections in ((INT4, PROJECTIONS), *((form, WIDE) for form in (*SMALL, *BYTES))):
        for p in projections:
            for m in BATCHES:
                shape = f"{m} x {p.n} x {p.k} ({p.model} {p.name})"
                shape = shape if form is INT4 else f"{form.name}, {shape}"
                prepare = lambda s=(form, m, p.n, p.k): _prepare(*s)  # noqa: E731
                bytes_ = cost(m, p.n, p.k, form.of(p.k).bits)
                yield Case("packed_matmul", shape, "bf16", bytes_, prepare, graph=True)


def _prepare(form: Form, m: int, n: int, k: int) -> Prepared:
    x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w = counted(random_weights(form, n, k))
    wide_NK = packed_reference(w, torch.bfloat16)

    def error() -> float:
        exact = x_MK.double() @ packed_reference(w).double().T
        return relative_error(packed_matmul(x_MK, w, prefetch=True, impl="gluon"), exact)

    return Prepared(
        lambda: packed_matmul(x_MK, w, prefetch=True, impl="gluon"),
        {"cuBLAS, bf16": lambda: F.linear(x_MK, wide_NK)},
        error,
    )


def plans(m: int, n: int, k: int, group: int = GROUP) -> list[Plan]:
    """Around the default: more and fewer parts, one warpgroup or two, wider and narrower steps, and rings."""
    default, found = packed_plan(m, n, k, group), []
    kinds = ("packed", "packed warps") if row_block(m) <= WARP_ROWS else ("packed",)
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
                w = counted(random_packed(n, k))
                return lambda: packed_matmul(x_MK, w, prefetch=True)

            key = tuning_key(m, p.n, p.k, GROUP)
            yield Tuning(key, [plan._asdict() for plan in plans(m, p.n, p.k)], prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
