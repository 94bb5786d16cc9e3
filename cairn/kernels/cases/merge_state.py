"""The variants of `merge_state` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention.merge_state import (
    State,
    _key,
    _merge_kernel,
    cost,
    merge_state,
    merge_state_reference,
)
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.attention.merge_state"


VARIANTS = [
    Variant(
        f"merge_state {columns} bf16",
        _merge_kernel,
        dict(a="*bf16", a_lse="*fp32", b="*bf16", b_lse="*fp32", out="*bf16", lse="*fp32", rows="i32")
        | {f"{side}_{what}": "i32" for side in ("a", "b", "out") for what in ("token", "head")}
        | {f"{side}_{what}": "i32" for side in ("a_lse", "b_lse", "lse") for what in ("token", "head")},
        dict(HEADS=32, C=columns, WIDTH=columns, ROWS=32),
        {"num_warps": 4},
        ("a", "a_lse", "b", "b_lse", "out", "lse", "a_token", "a_head", "b_token", "b_head", "out_token", "out_head"),
    )
    for columns in (64, 128)
]  # fmt: skip


def _random(tokens: int, heads: int, columns: int) -> State:
    out_THC = torch.randn(tokens, heads, columns, device="cuda", dtype=torch.bfloat16)
    return State(out_THC, 3 * torch.randn(tokens, heads, device="cuda"))


def _prepare(tokens: int, heads: int, columns: int) -> Prepared:
    a, b, joined = (_random(tokens, heads, columns) for _ in range(3))

    def error() -> float:
        poison(*joined)
        merge_state(a, b, joined)
        exact = merge_state_reference(
            *(State(s.out_THC.double(), s.lse_TH.double()) for s in (a, b))
        )
        return relative_error(joined, exact)

    compiled = torch.compile(merge_state_reference)
    return Prepared(
        lambda: merge_state(a, b, joined), {"torch.compile": lambda: compiled(a, b)}, error
    )


def cases() -> Iterator[Case]:
    for tokens, heads, columns in ((256, 32, 128), (16384, 32, 128)):
        yield Case(
            "merge_state", f"{tokens} x {heads} x {columns}", "bf16", cost(tokens, heads, columns),
            lambda shape=(tokens, heads, columns): _prepare(*shape), graph=tokens < 1024,
        )  # fmt: skip


def tuning() -> Iterator[Tuning]:
    candidates = [
        {"rows": rows, "warps": warps} for rows in (4, 8, 16, 32, 64) for warps in (1, 2, 4, 8)
    ]

    yield Tuning(_key(128, torch.bfloat16), candidates, lambda: _prepare(16384, 32, 128).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
