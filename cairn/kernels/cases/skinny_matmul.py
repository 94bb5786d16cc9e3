"""The variants of `skinny_matmul` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention.attention_rings import described
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.epilogue import Epilogue, matmul_reference
from cairn.kernels.matmul.projections import QWEN3_06B, QWEN3_8B
from cairn.kernels.matmul.skinny_kernels import join_kernel
from cairn.kernels.matmul.skinny_matmul import JOINED, KERNELS, _default, cost, skinny_matmul
from cairn.kernels.matmul.skinny_plans import (
    BESIDE_8_BITS,
    BESIDE_RING,
    PIECE,
    Plan,
    beside_plan,
    candidates,
    default_plan,
    row_block,
    row_plan,
    skinny_is_faster,
)
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.matmul.skinny_matmul"


def _key(m: int, n: int, k: int, dtype: torch.dtype) -> str:
    return _default(m, n, k, dtype)[0]


def _numbers(kernel: Any, known: dict[str, Any]) -> dict[str, str]:
    return {name: "i32" for name in kernel.arg_names if name not in known}


def _variant(plan: Plan, m: int, k: int, swiglu: bool = False) -> Variant:
    kernel = KERNELS[plan.kernel]
    constants: dict[str, Any] = dict(
        scale_x=None,
        scale_w=None,
        bias=None,
        residual=None,
        SWIGLU=swiglu,
        OVERLAP=True,
        EARLY=True,
    )
    if plan.kernel == "row":
        types = {"x": "*bf16", "w": "*bf16", "y": "*bf16"}
        constants |= dict(BN=plan.block_n, BK=plan.block_k, CHUNKS=triton.cdiv(k, plan.block_k))
    else:
        box = [PIECE // 16, 2, 8, plan.block_k] if swiglu else [PIECE, plan.block_k]
        types = {"x": described([row_block(m), plan.block_k]), "w": described(box), "y": "*bf16"}
        types |= {"parts": "*fp32"} if plan.parts(k) > 1 else {}
        constants |= {} if plan.parts(k) > 1 else {"parts": None}
        constants |= dict(PIECES=plan.block_n // PIECE, SPLIT=plan.parts(k), STAGES=plan.stages)
        constants |= dict(BLOCKS=False)
    types |= _numbers(kernel, types | constants)
    shape = f"{m} x {plan.block_n} x {plan.block_k if plan.kernel == 'stream' else k}"
    aligned = {"y", "parts", "stride_w", "stride_y", "N", "K"}
    aligned |= {"x", "w"} if plan.kernel == "row" else set()
    return Variant(
        f"skinny {plan.kernel} {shape}, {plan.parts(k)} parts, {plan.warps} warps, {plan.stages} stages"
        f"{', swiglu' if swiglu else ''}",
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: constants[name] for name in kernel.arg_names if name in constants},
        {"num_warps": plan.warps},
        tuple(name for name in kernel.arg_names if name in aligned & types.keys()),
        "none" if plan.kernel == "row" else "wgmma",
        gluon=plan.kernel == "stream",
    )


def _join_variant(parts: int, swiglu: bool) -> Variant:
    numbers = dict.fromkeys(("stride_r", "stride_y", "M", "N"), "i32")
    constants = dict(
        PARTS=parts, SWIGLU=swiglu, BLOCK=JOINED, OVERLAP=True, bias=None, residual=None
    )
    name = f"skinny join {parts} parts{' + swiglu' if swiglu else ''}"
    types = {"parts": "*fp32", "y": "*bf16", **numbers}
    return Variant(
        name, join_kernel, types, constants, {"num_warps": 2}, ("parts", "y", "stride_y", "N")
    )


PROJECTIONS = (*QWEN3_8B, *QWEN3_06B)


BATCHES = (1, 8, 16, 32, 64)


_SHIPPED = [
    *(_variant(default_plan(m, p.n, p.k), m, p.k) for p in PROJECTIONS for m in BATCHES),
    *(
        _variant(default_plan(128, p.n, p.k), 128, p.k)
        for p in QWEN3_06B
        if skinny_is_faster(128, p.n, p.k)
    ),
    *(
        _variant(default_plan(256, p.n, p.k), 256, p.k)
        for p in QWEN3_06B
        if skinny_is_faster(256, p.n, p.k)
    ),
    *(
        _variant(beside_plan(m, p.n, p.k, ring), m, p.k)
        for ring in (BESIDE_RING, BESIDE_8_BITS)
        for p in QWEN3_06B
        for m in (32, 64, 128)
        if skinny_is_faster(128, p.n, p.k)
    ),
    *(_variant(default_plan(m, 24576, 4096), m, 4096, swiglu=True) for m in (1, 8, 64, 128)),
    _variant(row_plan(2048, 2, 8), 1, 2048),
    _join_variant(4, swiglu=False),
    _join_variant(1, swiglu=True),
]


VARIANTS = list({variant.name: variant for variant in _SHIPPED}.values())


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("skinny_matmul"):
        m, _, k = numbers_of(entry).values()
        if how["impl"] == "triton":
            plan = Plan(*(how[name] for name in Plan._fields))
            yield _variant(plan, m, k)
            if plan.parts(k) > 1:
                yield _join_variant(plan.parts(k), swiglu=False)


def _operands(m: int, n: int, k: int) -> tuple[Tensor, Tensor]:
    x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return x_MK, torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5


def cases() -> Iterator[Case]:
    for p in PROJECTIONS:
        for m in BATCHES:
            yield Case(
                "skinny_matmul",
                f"{m} x {p.n} x {p.k} ({p.model} {p.name})",
                "bf16",
                cost(m, p.n, p.k),
                lambda s=(m, p.n, p.k): _prepare(*s),
                graph=True,
            )


def _prepare(m: int, n: int, k: int) -> Prepared:
    x_MK, w_NK = _operands(m, n, k)
    y_MN = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def ours() -> Tensor:
        return skinny_matmul(x_MK, w_NK, out=y_MN, prefetch=True, impl="triton")

    def error() -> float:
        poison(y_MN)
        rows = slice(None, None, max(1, n // 16384))  # of w: some are enough for the truth
        exact = matmul_reference(x_MK.double(), w_NK[rows], Epilogue(), torch.float64)
        return relative_error(ours()[:, rows], exact)

    return Prepared(ours, {"cuBLAS": lambda: F.linear(x_MK, w_NK)}, error)


def tuning() -> Iterator[Tuning]:
    for p in PROJECTIONS:
        for m in BATCHES:

            def prepare(m: int = m, n: int = p.n, k: int = p.k) -> Callable[[], Tensor]:
                x_MK, w_NK = _operands(m, n, k)
                y_MN = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
                return lambda: skinny_matmul(x_MK, w_NK, out=y_MN, prefetch=True)

            plans = [{**plan._asdict(), "impl": "triton"} for plan in candidates(m, p.n, p.k)]
            yield Tuning(_key(m, p.n, p.k, torch.bfloat16), [*plans, {"impl": "torch"}], prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
