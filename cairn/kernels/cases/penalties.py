"""The variants of `penalties` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.sampling.penalties import (
    cost,
    penalize,
    penalize_reference,
    random_penalties,
)
from cairn.kernels.sampling.penalties_kernel import _count_kernel, _penalize_kernel

KERNEL = "cairn.kernels.sampling.penalties"


TYPES = dict(
    logits="*bf16", out="*fp32", rows="*i64", repetitions="*fp32", presences="*fp32", frequencies="*fp32",
    counts="*i32", prompt="*i32", allowed="*i32", logits_stride="i32", out_stride="i32", counts_stride="i32",
    prompt_stride="i32", allowed_stride="i32",
)  # fmt: skip


VARIANTS = [
    Variant(
        "penalties 151936 bf16, everything",
        _penalize_kernel,
        TYPES,
        dict(VOCABULARY=151936, BLOCK=4096, PENALTIES=True, PROMPT=True, ALLOWED=True),
        {"num_warps": 8},
        tuple(name for name in TYPES if name not in ("prompt_stride", "allowed_stride")),
    ),
    Variant(
        "penalties count",
        _count_kernel,
        dict(counts="*i32", tokens="*i32", rows="*i32", tokens_count="i32", stride="i32"),
        {"BLOCK": 128},
        {"num_warps": 4},
        ("counts", "tokens", "rows", "stride"),
    ),
]


def _prepare(batch: int, vocabulary: int) -> Prepared:
    logits_BV = torch.randn(batch, vocabulary, device="cuda", dtype=torch.bfloat16)
    penalties, rows_B = random_penalties(batch, vocabulary), torch.randperm(batch, device="cuda")
    out_BV = torch.empty(batch, vocabulary, device="cuda")

    def ours() -> Tensor:
        return penalize(logits_BV, penalties, rows_B=rows_B, out=out_BV)

    def error() -> float:
        poison(out_BV)
        return relative_error(ours(), penalize_reference(logits_BV, penalties, rows_B, None))

    compiled = torch.compile(penalize_reference)
    anchors = {"torch.compile": lambda: compiled(logits_BV, penalties, rows_B, None)}
    return Prepared(ours, anchors, error)


def cases() -> Iterator[Case]:
    yield Case(
        "penalties", "256 x 151936", "bf16", cost(256, 151936), lambda: _prepare(256, 151936), 1e-5
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
