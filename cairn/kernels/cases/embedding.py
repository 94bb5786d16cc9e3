"""The variants of `embedding` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.embedding import (
    _TOGETHER,
    DEFAULT,
    DEFAULT_BACKWARD,
    _gather_kernel,
    _join_kernel,
    _scatter_kernel,
    cost,
    cost_backward,
    embedding,
    embedding_backward,
    embedding_backward_reference,
    embedding_reference,
)
from cairn.kernels.tuned import Tuning, shipped

KERNEL = "cairn.kernels.layer.embedding"


_GATHERED = {"tokens": "*i64", "weight": "*bf16", "x": "*bf16"}


_SCATTERED = {"grad": "*bf16", "ordered": "*i32", "places": "*i64", "d": "*bf16", "parts": "*fp32"}


_NUMBERS = {"first": "i32", "vocab": "i32"}


def _variant(block: int, warps: int) -> Variant:
    strides = {"weight_stride": "i32", "x_stride": "i32"}
    return Variant(
        f"gather 4096, block {block}, {warps} warps",
        _gather_kernel,
        _GATHERED | _NUMBERS | strides,
        {"COLUMNS": 4096, "BLOCK": block},
        {"num_warps": warps},
        [*_GATHERED, *strides],
    )


def _variant_backward(block: int, chunk: int, warps: int) -> Variant:
    strides = {"grad_stride": "i32", "d_stride": "i32"}
    return Variant(
        f"scatter 4096, block {block}, chunks of {chunk}, {warps} warps",
        _scatter_kernel,
        _SCATTERED | _NUMBERS | strides | {"count": "i32"},
        {"COLUMNS": 4096, "BLOCK": block, "CHUNK": chunk, "ADD": False},
        {"num_warps": warps},
        [*_SCATTERED, *strides],
    )


def _variant_join(chunk: int) -> Variant:
    pointers = {
        name: kind for name, kind in _SCATTERED.items() if name in ("ordered", "d", "parts")
    }
    return Variant(
        f"join 4096, chunks of {chunk}",
        _join_kernel,
        pointers | _NUMBERS | {"d_stride": "i32", "count": "i32"},
        {"COLUMNS": 4096, "BLOCK": 256, "CHUNK": chunk, "ADD": False, "TOGETHER": _TOGETHER},
        aligned=[*pointers, "d_stride"],
    )


_CANDIDATES = [{"block": b, "warps": w} for b, w in ((1024, 4), (2048, 4), (4096, 4), (4096, 8))]


_CANDIDATES_BACKWARD = [{"block": b, "chunk": c, "warps": w} for b, c, w in
                        ((4096, 32, 4), (4096, 32, 8), (2048, 32, 4), (2048, 16, 2), (1024, 32, 4))]  # fmt: skip


VARIANTS = [
    _variant(DEFAULT["block"], DEFAULT["warps"]),
    _variant_backward(*DEFAULT_BACKWARD.values()),
    _variant_join(DEFAULT_BACKWARD["chunk"]),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("embedding"):
        if entry.startswith("backward"):
            yield _variant_backward(how["block"], how["chunk"], how["warps"])
            yield _variant_join(how["chunk"])
        else:
            yield _variant(how["block"], how["warps"])


_TOKENS, _VOCAB, _COLUMNS = 16384, 151936, 4096


def cases() -> Iterator[Case]:
    shape = f"{_TOKENS} of {_VOCAB} x {_COLUMNS}"
    forward = cost(_TOKENS, _COLUMNS)
    yield Case("embedding", shape, "bf16", forward, functools.partial(_prepare, False))
    backward = cost_backward(_TOKENS, _TOKENS, _VOCAB, _COLUMNS)
    yield Case("embedding backward", shape, "bf16", backward, functools.partial(_prepare, True))


def _prepare(backward: bool) -> Prepared:
    # Frequencies as in text: the most frequent token is one in twenty.
    share = 1 / torch.arange(1, _VOCAB + 1, device="cuda", dtype=torch.float64)
    tokens = torch.multinomial(share, _TOKENS, replacement=True)
    weight = torch.randn(_VOCAB, _COLUMNS, device="cuda").bfloat16()
    x = torch.randn(_TOKENS, _COLUMNS, device="cuda").bfloat16()

    def run() -> Tensor:
        if backward:
            return embedding_backward(x, tokens, _VOCAB, weight.dtype, impl="triton")
        return embedding(tokens, weight, out=x, impl="triton")

    def error() -> float:
        if backward:
            truth = torch.zeros(_VOCAB, _COLUMNS, device="cuda")
            return relative_error(run(), embedding_backward_reference(x, tokens, truth))
        poison(x)
        return relative_error(run(), embedding_reference(tokens, weight))

    anchors = {"torch": lambda: F.embedding(tokens, weight)}
    if backward:
        again = torch.ops.aten.embedding_dense_backward
        anchors = {"torch": lambda: again(x, tokens, _VOCAB, -1, False)}
    return Prepared(run, anchors, error)


def tuning() -> Iterator[Tuning]:
    yield Tuning("forward,bfloat16", _CANDIDATES, lambda: _prepare(False).ours)
    yield Tuning("backward,bfloat16", _CANDIDATES_BACKWARD, lambda: _prepare(True).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
