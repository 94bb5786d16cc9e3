"""The variants of `kv_write` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.rope import (
    CANDIDATES,
    DEFAULT,
    Heads,
    Pages,
    key,
    random_inputs,
    rope_reference,
    variant,
)
from cairn.kernels.norm.rows import blocks
from cairn.kernels.paged.kv_write import FP8, cost, rope_write
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.paged.kv_write"


VARIANTS = [
    variant(128, 32, 8, DEFAULT, True, "bf16"),
    variant(128, 32, 8, DEFAULT, True, "fp8e4nv"),
    variant(128, 32, 8, DEFAULT, False, "bf16"),
    variant(64, 14, 2, DEFAULT, False, "bf16"),
    variant(96, 32, 32, DEFAULT, False, "bf16"),
    variant(256, 8, 4, DEFAULT, True, "bf16"),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("kv_write"):
        yield variant(numbers_of(entry)["size"], 32, 8, how, True, "bf16")


_TOKENS, _PAGE = 16384, 64


def cases() -> Iterator[Case]:
    bf16 = torch.bfloat16
    for tokens, q, kv, normed, cache in (
        (_TOKENS, 32, 8, True, bf16), (_TOKENS, 16, 8, True, bf16), (_TOKENS, 32, 8, False, bf16),
        (_TOKENS, 32, 8, True, FP8), (256, 32, 8, True, bf16),
    ):  # fmt: skip
        yield Case(
            f"rope{' + qk-norm' * normed} + kv-write{' fp8' * (cache == FP8)}",
            f"{tokens} tokens, {q}/{kv} heads x 128",
            "bf16",
            cost(tokens, Heads(q, kv), 128, 2, cache.itemsize),
            functools.partial(_prepare, tokens, q, kv, normed, cache),
            graph=True,
        )


def _prepare(tokens: int, q: int, kv: int, normed: bool, cache: torch.dtype) -> Prepared:
    inputs = random_inputs(tokens, q, kv, normed)
    out = torch.empty(tokens, q, 128, dtype=torch.bfloat16, device="cuda")
    count = blocks(tokens, _PAGE)
    where = torch.randperm(count, device="cuda")[:, None] * _PAGE
    slots = (where + torch.arange(_PAGE, device="cuda")).flatten()[:tokens]
    caches = torch.empty(2, count, _PAGE, kv, 128, dtype=cache, device="cuda")
    scale = torch.ones(1, device="cuda") if cache == FP8 else None
    pages = Pages(slots, caches[0], caches[1], scale, scale)

    def run() -> Tensor:
        return rope_write(*inputs, pages, out=out, impl="triton")

    def error() -> float:
        poison(out, caches)
        run()
        truth = rope_reference(inputs.qkv.double(), *inputs[1:])
        stored = [kept.view(-1, kv, 128)[slots] for kept in caches.unbind()]
        loose = 0.2 if cache == FP8 else 1.0  # fp8 keeps three bits
        return max(relative_error(out, truth[0]), loose * relative_error(stored, truth[1:]))

    plain = compiled(_plain)
    return Prepared(run, {"torch.compile": lambda: plain(*inputs, caches, slots)}, error)


def _plain(
    qkv: Tensor, heads: Heads, table: Tensor, positions: Tensor, caches: Tensor, slots: Tensor
) -> Tensor:
    q, k, v = rope_reference(qkv, heads, table, positions)
    for cache, new in ((caches[0], k), (caches[1], v)):
        cache.view(-1, *new.shape[1:])[slots] = new.to(cache.dtype)
    return q


def tuning() -> Iterator[Tuning]:
    prepare = functools.partial(_prepare, _TOKENS, 32, 8, True, torch.bfloat16)
    yield Tuning(key(128, torch.bfloat16), CANDIDATES, lambda: prepare().ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
