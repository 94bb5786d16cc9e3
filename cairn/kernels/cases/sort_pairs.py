"""The variants of `sort_pairs` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator
from typing import Any

import torch

from cairn.kernels.experts.sort_pairs import (
    _count_kernel,
    _place_kernel,
    _sort_pairs_kernel,
    block_of,
    chunk_constants,
    cost,
    sort_pairs,
    sort_pairs_reference,
    warps_of,
)
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.experts.sort_pairs"


def _variant(pairs: int) -> Variant:
    types = dict(chosen="*i32", order="*i32", places="*i32", ends="*i32", pairs="i32")
    block = block_of(pairs)
    constants = dict(BLOCK=block, OVERLAP=True)
    aligned = tuple(name for name in types if name != "pairs")
    options = {"num_warps": warps_of(block)}
    return Variant(
        f"sort pairs, blocks of {block}", _sort_pairs_kernel, types, constants, options, aligned
    )


def _chunked(what: str, function: Any, names: tuple[str, ...]) -> Variant:
    types = dict.fromkeys(names, "*i32") | dict(pairs="i32", chunk="i32")
    fixed = {**chunk_constants(128), "OVERLAP": True}
    options = {"num_warps": 8}
    return Variant(f"sort pairs in chunks, {what}", function, types, fixed, options, names)


VARIANTS = [
    _variant(8),
    _variant(8192),
    _chunked("counting", _count_kernel, ("chosen", "counts")),
    _chunked("placing", _place_kernel, ("chosen", "order", "places", "ends", "counts")),
]


def cases() -> Iterator[Case]:
    for tokens in (1, 256, 8192, 16384):
        work = cost(tokens * 8, 128)
        yield Case(
            "sort_pairs",
            f"{tokens} x 8 of 128",
            "int32",
            work,
            lambda t=tokens: _prepare(t),
            graph=True,
        )


def _prepare(tokens: int, per_token: int = 8, count: int = 128) -> Prepared:
    chosen_TK = torch.rand(tokens, count, device="cuda").topk(per_token).indices.int()
    exact = sort_pairs_reference(chosen_TK, count)

    def error() -> float:
        found = sort_pairs(chosen_TK, count, impl="triton")
        equal = (torch.equal(a, b) for a, b in zip(found[:3], exact[:3], strict=True))
        return 0.0 if all(equal) else 1.0

    return Prepared(
        lambda: sort_pairs(chosen_TK, count, impl="triton"),
        {"torch's stable sort": lambda: chosen_TK.flatten().sort(stable=True)},
        error,
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
