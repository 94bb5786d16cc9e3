"""The variants of `skinny_fp8` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention_rings import described
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.matmul.projections import QWEN3_06B, QWEN3_8B
from cairn.kernels.matmul.skinny_fp8 import (
    E4M3,
    _default,
    block_plan,
    cost,
    fp8_plan,
    most_registers,
    skinny_fp8,
)
from cairn.kernels.matmul.skinny_matmul import KERNELS
from cairn.kernels.matmul.skinny_plans import PIECE, Plan, candidates, row_block
from cairn.kernels.matmul.skinny_row import one_row_kernel
from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.matmul.skinny_fp8"
BATCHES = (1, 8, 16, 64)  # one row is not quantised
MORE = (128, 256)  # rows of a larger model's products


def _variant(plan: Plan, m: int, k: int, swiglu: bool = False, blocks: bool = False) -> Variant:
    kernel: Any = one_row_kernel if plan.kernel == "row" else KERNELS[plan.kernel]
    constants: dict[str, Any] = dict(bias=None, residual=None, SWIGLU=swiglu, OVERLAP=True, EARLY=True)  # fmt: skip
    if plan.kernel == "row":
        types = {"x": "*bf16", "w": "*fp8e4nv", "scale_w": "*fp32", "y": "*bf16"}
        constants |= dict(BN=plan.block_n, BK=plan.block_k, CHUNKS=triton.cdiv(k, plan.block_k))
        constants |= dict(WARPS=plan.warps, WHOLE=k % plan.block_k == 0)
    else:
        box = [PIECE // 16, 2, 8, plan.block_k] if swiglu else [PIECE, plan.block_k]
        rows = described([row_block(m), plan.block_k], E4M3)
        types = {"x": rows, "w": described(box, E4M3), "y": "*bf16"}
        types |= dict.fromkeys(("scale_x", "scale_w"), "*fp32")
        types |= {"parts": "*fp32"} if plan.parts(k) > 1 else {}
        constants |= {} if plan.parts(k) > 1 else {"parts": None}
        constants |= dict(PIECES=plan.block_n // PIECE, SPLIT=plan.parts(k), STAGES=plan.stages)
    constants |= dict(BLOCKS=blocks)
    most = most_registers(plan, k, blocks) if plan.kernel == "row" else None
    registers = {} if most is None else {"maxnreg": most}
    known = types | constants
    types |= {name: "i32" for name in kernel.arg_names if name not in known}
    aligned = {"y", "parts", "scale_x", "scale_w", "stride_w", "stride_y", "N", "K"}
    aligned |= {"x", "w"} if plan.kernel == "row" else set()
    return Variant(
        f"skinny fp8 {plan.kernel} {m} x {plan.block_n} x {plan.block_k}, {plan.parts(k)} parts, "
        f"{plan.warps} warps, {plan.stages} stages{', swiglu' * swiglu}{', blocks' * blocks}",
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: constants[name] for name in kernel.arg_names if name in constants},
        {"num_warps": plan.warps} | registers,
        tuple(name for name in kernel.arg_names if name in aligned & types.keys()),
        "none" if plan.kernel == "row" else "wgmma",
        gluon=True,
    )


_SHIPPED = [
    *(_variant(fp8_plan(m, p.n, p.k, m == 1), m, p.k) for p in QWEN3_8B for m in BATCHES),
    *(
        _variant(fp8_plan(m, n, k, False), m, k)
        for m, n, k in ((128, 4096, 12288), (256, 24576, 4096))
    ),
    _variant(fp8_plan(1, 24576, 4096, True), 1, 4096, swiglu=True),
    _variant(fp8_plan(8, 24576, 4096, False), 8, 4096, swiglu=True),
    _variant(fp8_plan(1, 6144, 4096, True), 1, 4096, blocks=True),
    *(_variant(block_plan(m, 4096, 12288), m, 12288, blocks=True) for m in (8, 64)),
]
VARIANTS = list({variant.name: variant for variant in _SHIPPED}.values())


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("skinny_fp8"):
        numbers = numbers_of(entry)
        yield _variant(Plan(**how), numbers.get("m", 1), numbers["k"])


def _operands(m: int, n: int, k: int) -> tuple[Tensor | Quantized, Quantized]:
    x_MK = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    w_NK = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * k**-0.5
    return x_MK if m == 1 else quantize(x_MK), quantize(w_NK)


def cases() -> Iterator[Case]:
    for p in (*QWEN3_8B, *QWEN3_06B):
        for m in (*BATCHES, *(MORE if p in QWEN3_8B else ())):
            shape = f"{m} x {p.n} x {p.k} ({p.model} {p.name})"
            prepare = lambda s=(m, p.n, p.k): _prepare(*s)  # noqa: E731
            yield Case("skinny_fp8", shape, "fp8", cost(m, p.n, p.k), prepare, graph=True)


def _prepare(m: int, n: int, k: int) -> Prepared:
    x, w = _operands(m, n, k)
    wide = x if isinstance(x, Tensor) else (x.values.float() * x.scale).bfloat16()
    weight = (w.values.float() * w.scale).bfloat16()

    def error() -> float:
        rows = slice(None, None, max(1, n // 16384))  # of w: some are enough for the truth
        values = x.double() if isinstance(x, Tensor) else x.values.double() * x.scale.double()
        exact = values @ (w.values[rows].double() * w.scale[rows].double()).T
        return relative_error(skinny_fp8(x, w, prefetch=True, impl="triton")[:, rows], exact)

    return Prepared(
        lambda: skinny_fp8(x, w, prefetch=True, impl="triton"),
        {"cuBLAS, bf16": lambda: F.linear(wide, weight)},
        error,
    )


def plans(m: int, n: int, k: int) -> list[Plan]:
    """Candidates for tuning: those of the 16-bit matmul with as many bytes."""
    near = candidates(1 if m == 1 else max(m, 2), n, -(-k // 2))
    kept = [p for p in near if (p.kernel == "row") == (m == 1)]
    return [p._replace(block_k=2 * p.block_k) for p in kept]


def tuning() -> Iterator[Tuning]:
    for p in (*QWEN3_8B, *QWEN3_06B):
        for m in BATCHES:

            def prepare(m: int = m, n: int = p.n, k: int = p.k) -> Callable[[], Tensor]:
                x, w = _operands(m, n, k)
                return lambda: skinny_fp8(x, w, prefetch=True)

            tried = [plan._asdict() for plan in plans(m, p.n, p.k)]
            yield Tuning(_default(m, p.n, p.k, m == 1)[0], tried, prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
