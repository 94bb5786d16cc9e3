"""y = x @ w.T for at most 64 rows of x: a decode step, where reading w is all the work.

    x [M, K], w [N, K] (as nn.Linear keeps it)  ->  + bias  ->  SwiGLU  ->  + residual  ->  y [M, N]

Every weight is read once, so the time to beat is the bytes of w over the bandwidth. Two kernels share the shapes:

    rows    M <= 8: a program reads whole rows of w and multiplies on the ordinary cores; nothing to join
    tiles   tensor cores on tiles of w through TMA; w's rows are the tall side of the product, so that few rows of
            x waste little. Where there are fewer tiles than multiprocessors K is cut into `split` slabs

The slabs' float32 sums are joined in a fixed order: by a second small kernel (also where SwiGLU needs two columns),
or by whichever program of a tile finishes last, if the caller lends `counters`. Either way results are the same from
run to run; they may differ in the last bit between numbers of rows.

A short product is over before the next launch has begun, so these kernels start while their predecessor still runs
(programmatic dependent launch), ask for their weights, which no predecessor writes, and only then wait for it.
Nothing is read back by the host; all of it can live in a CUDA graph.
Bytes moved: N*K + M*K + M*N elements, and twice split*M*N float32 through the L2 cache.
"""

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.arguments import as_rows, check, output, require, short
from cairn.kernels.dispatch import Impl, choose, needs_cuda, needs_hopper
from cairn.kernels.epilogue import Activation, Epilogue, matmul_reference, with_epilogue
from cairn.kernels.kernel import Case, Cost, Prepared, Variant
from cairn.kernels.projections import QWEN3_06B, QWEN3_8B
from cairn.kernels.skinny_kernels import join_kernel, rows_kernel, tiles_kernel
from cairn.kernels.skinny_plans import Plan, candidates, default_plan, row_block, rows_plan
from cairn.kernels.tiles import tma_obstacle
from cairn.kernels.tuned import Tuning, tuned

MOST_ROWS = 64
JOINED = 256  # columns that a program joins
KERNELS: dict[str, Any] = {"rows": rows_kernel, "tiles": tiles_kernel, "join": join_kernel}


def skinny_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    *,
    bias_N: Tensor | None = None,
    activation: Activation | None = None,
    residual_MN: Tensor | None = None,
    out: Tensor | None = None,
    counters: Tensor | None = None,
    impl: Impl = "auto",
) -> Tensor:
    """x @ w.T and what follows; x has at most 64 rows. See the head of this file.

    `counters`: int32 zeros, one per 8 rows of w; products that run at the same time need counters of their own.
    They are zero again afterwards.
    """
    check("x_MK", x_MK, dtypes=(torch.bfloat16, torch.float16, torch.float32))
    x = as_rows("x_MK", x_MK)
    m, k = x.shape
    require(m <= MOST_ROWS, "x_MK", f"at most {MOST_ROWS} rows", m)
    check("w_NK", w_NK, dtypes=(x.dtype,), shape=(None, k), beside=x)
    epilogue = Epilogue(bias_N, activation, residual_MN)
    epilogue.check(x_MK, w_NK)
    n = w_NK.shape[0]
    if counters is not None:
        check("counters", counters, dtypes=(torch.int32,), beside=x, packed=True)
        require(counters.numel() * 8 >= n, "counters", f"at least {-(-n // 8)}", counters.numel())
    shape = (*x_MK.shape[:-1], epilogue.columns(n))
    if out is not None:
        output("out", out, shape, x.dtype, x)
    plan, wins = _config(m, n, k, x.dtype)
    offers = {"triton": _obstacle(x, w_NK, epilogue), "torch": None, "reference": None}
    if wins == "torch":
        offers = {"torch": None, **offers}
    how = choose("skinny_matmul", impl, offers).impl
    if how != "triton":
        compute = matmul_reference if how == "reference" else with_epilogue
        return compute(x_MK, w_NK, epilogue, x.dtype, out)
    y = output("out", out, shape, x.dtype, x)
    if y.numel():
        flat = None if residual_MN is None else as_rows("residual_MN", residual_MN)
        after = epilogue._replace(residual_MN=flat)
        launch(x, w_NK, as_rows("out", y), after, plan, counters)
    return y


def _obstacle(x: Tensor, w: Tensor, epilogue: Epilogue) -> str | None:
    """Why the kernels cannot run these, or None."""
    if x.dtype == torch.float32:
        return "it multiplies bfloat16 and float16, not float32"
    given = [t for t in (x, w, epilogue.bias_N, epilogue.residual_MN) if t is not None]
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        return "it has no backward, and a gradient is wanted"
    blocked = tma_obstacle("x_MK", x) or tma_obstacle("w_NK", w) or needs_cuda(*given)
    return blocked or (needs_hopper(x) if x.is_cuda else None)


def _key(m: int, n: int, k: int, dtype: torch.dtype) -> str:
    return f"m={1 if m == 1 else row_block(m)},n={n},k={k},{short(dtype)}"


def _config(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Plan, str]:
    """Which plan, and who is faster: "triton" or "torch"."""
    default = {**default_plan(m, n, k)._asdict(), "impl": "triton"}
    found = tuned("skinny_matmul", _key(m, n, k, dtype), default)
    return Plan(**{name: found[name] for name in Plan._fields}), str(found["impl"])


def launch(
    x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, plan: Plan, counters: Tensor | None
) -> None:
    """Run the kernels on checked two-dimensional operands."""
    (m, k), n = x.shape, w.shape[0]
    split = plan.parts(k)
    swiglu = epilogue.activation is not None
    overlap = plan.overlap and os.environ.get("TRITON_INTERPRET") != "1"
    pdl = {"launch_pdl": True} if overlap else {}
    parts = x.new_empty(split, m, n, dtype=torch.float32) if split > 1 or swiglu else None
    last = counters if parts is not None and not swiglu else None
    bias, residual = epilogue.bias_N, epilogue.residual_MN
    stride_r = 0 if residual is None else residual.stride(0)
    constants = dict(plan.constants(m, k), OVERLAP=overlap, num_warps=plan.warps, **pdl)
    if plan.kernel == "rows":
        after = (bias, residual, y) if parts is None else (None, None, parts)
        strides = (x.stride(0), w.stride(0), stride_r, after[2].stride(-2))
        grid = (triton.cdiv(n, plan.block_n),)
        KERNELS["rows"][grid](x, w, *after, *strides, m, n, k, **constants)
    else:
        KERNELS["tiles"][triton.cdiv(n, plan.block_n), split](
            TensorDescriptor.from_tensor(x, [row_block(m), plan.block_k]),
            TensorDescriptor.from_tensor(w, [plan.block_n, plan.block_k]),
            *(w, bias, residual, y, parts, last, w.stride(0), stride_r, y.stride(0)),
            *(m, n, plan.slab(k)),
            **constants,
            num_stages=plan.stages,
        )
    if parts is not None and last is None:
        KERNELS["join"][triton.cdiv(y.shape[1], JOINED), m](
            *(parts, bias, residual, y, stride_r, y.stride(0), m, y.shape[1]),
            PARTS=split, SWIGLU=swiglu, BLOCK=JOINED, OVERLAP=overlap, num_warps=2, **pdl,
        )  # fmt: skip


def cost(m: int, n: int, k: int) -> Cost:
    return Cost(2.0 * m * n * k, 2.0 * (n * k + m * k + m * n))


POINTERS = {"x", "w", "w_pointer", "y", "parts", "counters"}
ALIGNED = POINTERS | {"stride_x", "stride_w", "stride_y", "N", "K", "slab"}


def _variant(plan: Plan, m: int, k: int, last: bool = False) -> Variant:
    """With `last` the last program of a tile joins the slabs."""
    types = {"x": "*bf16", "w": "*bf16", "w_pointer": "*bf16", "y": "*bf16"}
    kernel = KERNELS[plan.kernel]
    if plan.kernel == "tiles":
        types["x"] = f"tensordesc<bf16[{row_block(m)}, {plan.block_k}]>"
        types["w"] = f"tensordesc<bf16[{plan.block_n}, {plan.block_k}]>"
        types |= {"parts": "*fp32"} if plan.parts(k) > 1 else {}
        types |= {"counters": "*i32"} if last else {}
    constants: dict[str, Any] = dict(plan.constants(m, k), OVERLAP=plan.overlap)
    absent = {"bias", "residual", "parts", "counters"} - types.keys()
    constants |= dict.fromkeys(absent)
    types |= {name: "i32" for name in kernel.arg_names if name not in types.keys() | constants}
    uses_wgmma = plan.block_n >= 64 and row_block(m) >= 16
    options = {"num_warps": plan.warps, "num_stages": plan.stages}
    return Variant(
        f"skinny {plan.kernel} {m} x {plan.block_n} x {plan.block_k}, {plan.parts(k)} parts"
        f"{', last joins' if last else ''}, {plan.warps} warps, {plan.stages} stages",
        kernel,
        {name: types[name] for name in kernel.arg_names if name in types},
        {name: constants[name] for name in kernel.arg_names if name in constants},
        options if plan.kernel == "tiles" else {"num_warps": plan.warps},
        tuple(
            name for name in kernel.arg_names if name in ALIGNED and types.get(name, "t")[0] != "t"
        ),
        "none" if plan.kernel == "rows" else "wgmma" if uses_wgmma else "mma",
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
    _variant(rows_plan(8, stages=4), 4, 4096),
    _variant(rows_plan(), 8, 4096),
    _variant(default_plan(64, 4096, 4096), 64, 4096, last=True),
    _join_variant(4, swiglu=False),
    _join_variant(1, swiglu=True),
]
VARIANTS = list({variant.name: variant for variant in _SHIPPED}.values())


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
        return skinny_matmul(x_MK, w_NK, out=y_MN, impl="triton")

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
                return lambda: skinny_matmul(x_MK, w_NK, out=y_MN)

            plans = [{**plan._asdict(), "impl": "triton"} for plan in candidates(m, p.n, p.k)]
            yield Tuning(_key(m, p.n, p.k, torch.bfloat16), [*plans, {"impl": "torch"}], prepare)


if __name__ == "__main__":
    from cairn.kernels.demo import demo

    demo(__spec__.name)
