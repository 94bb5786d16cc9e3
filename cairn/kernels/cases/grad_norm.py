"""The variants of `grad_norm` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch
import triton.language as tl

from cairn.kernels.accuracy import relative_error
from cairn.kernels.arguments import short
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.optim.grad_norm import (
    DEFAULT,
    _squares_kernel,
    _total_kernel,
    cost,
    square_sum,
    square_sum_reference,
)
from cairn.kernels.optim.tensor_table import CHUNK
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.optim.grad_norm"


def _variant(kind: str, block: int, warps: int, stages: int) -> Variant:
    types = {"addresses": "*i64", "sizes": "*i64", "tensor_of": "*i32", "chunk_of": "*i32"}
    return Variant(
        f"squares {kind}, block {block}, {warps} warps, {stages} stages",
        _squares_kernel,
        types | {"sums": "*fp32", "tensors": "i32", "chunks": "i32"},
        {"dtype": tl.float32 if kind == "fp32" else tl.bfloat16, "ALIGNED": True, "CHUNK": CHUNK}
        | {"BLOCK": block, "STAGES": stages},
        {"num_warps": warps},
        [*types, "sums"],
    )


VARIANTS = [
    _variant("fp32", 4096, 4, 1),
    _variant("bf16", 4096, 4, 1),
    Variant(
        "total of squares",
        _total_kernel,
        {"sums": "*fp32", "total": "*fp32", "count": "i32"},
        {"WIDTH": 2048},
        {"num_warps": 4},
        ("sums", "total"),
    ),
]


# 268M elements, as a model has them: matrices and the vectors of norms
_SHAPES = [(4096, 4096)] * 16 + [(4096,)] * 33


def cases() -> Iterator[Case]:
    for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
        elements = sum(torch.Size(shape).numel() for shape in _SHAPES)
        moved = cost(elements, dtype.itemsize)
        yield Case("grad norm", "268M", name, moved, lambda dtype=dtype: _prepare(dtype))


def _prepare(dtype: torch.dtype) -> Prepared:
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in _SHAPES]
    return Prepared(
        lambda: square_sum(grads, impl="triton"),
        {"torch": lambda: torch.nn.utils.get_total_norm(grads, foreach=True)},
        lambda: relative_error(square_sum(grads, impl="triton"), square_sum_reference(grads)),
    )


def tuning() -> Iterator[Tuning]:
    ideas = [DEFAULT | {"block": block, "stages": stages, "per_sm": per_sm}
             for block, stages, per_sm in
             ((4096, 1, 8), (4096, 3, 4), (2048, 1, 16), (2048, 3, 8), (8192, 1, 8))]  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        yield Tuning(short(dtype), ideas, lambda dtype=dtype: _prepare(dtype).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
