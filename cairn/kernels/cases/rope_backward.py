"""The variants of `rope_backward` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.rope_backward import (
    DEFAULT,
    Gradients,
    Heads,
    _rope_backward_kernel,
    cost,
    rope_backward,
    rope_backward_reference,
)
from cairn.kernels.norm.rows import width
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.layer.rope_backward"


def _variant(
    heads: Heads, size: int, how: dict[str, int], normed: bool, in_place: bool = False
) -> Variant:
    pointers = dict.fromkeys(("dq", "dk", "dv", "qkv", "dqkv"), "*bf16")
    pointers |= {"table": "*fp32", "positions": "*i64", "parts": "*fp32"}
    pointers |= dict.fromkeys(("q_weight", "k_weight"), "*bf16") if normed else {}
    strides = ("dq_token", "dk_token", "dv_token", "qkv_token", "dqkv_token", "table_row")
    return Variant(
        f"rope backward {heads.q}/{heads.kv} x {size}{' + norms' * normed}{' in place' * in_place}, {how}",
        _rope_backward_kernel,
        pointers | dict.fromkeys(strides, "i32") | {"tokens": "i32", "eps": "fp32"},
        {"H": heads.q, "K": heads.kv, "C": size, "HALF": width(size // 2), "PLUS_ONE": False}
        | {"ROWS": how["rows"], "WITH_V": not in_place}
        | ({} if normed else {"q_weight": None, "k_weight": None}),
        {"num_warps": how["warps"]},
        [*pointers, *strides],
    )


_CANDIDATES = [
    {"rows": rows, "warps": warps, "per_sm": per_sm}
    for rows, warps, per_sm in (
        (16, 4, 4), (16, 4, 3), (16, 8, 2), (8, 2, 8), (8, 4, 5), (4, 2, 12),
    )
]  # fmt: skip


VARIANTS = [
    _variant(Heads(32, 8), 128, DEFAULT, True),
    _variant(Heads(16, 8), 128, DEFAULT, True, in_place=True),
    _variant(Heads(32, 8), 128, DEFAULT, False),
    _variant(Heads(14, 2), 64, DEFAULT, False),
]


_TOKENS = 16384


def cases() -> Iterator[Case]:
    for q, kv, normed in ((32, 8, True), (32, 8, False), (16, 8, True)):
        yield Case(
            f"rope{' + qk-norm' * normed} backward",
            f"{_TOKENS} tokens, {q}/{kv} heads x 128",
            "bf16",
            cost(_TOKENS, Heads(q, kv), 128, normed),
            functools.partial(_prepare, q, kv, normed),
            graph=True,
        )


def _prepare(q: int, kv: int, normed: bool) -> Prepared:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda").bfloat16()

    heads = Heads(q, kv, random(128), random(128)) if normed else Heads(q, kv)
    qkv, table = random(_TOKENS, (q + 2 * kv) * 128), random(4096, 128).float()
    grads = (random(_TOKENS, q, 128), random(_TOKENS, kv, 128), random(_TOKENS, kv, 128))
    positions = torch.arange(_TOKENS, device="cuda") % 4096

    def run() -> Gradients:
        return rope_backward(*grads, qkv, heads, table, positions, impl="triton")

    def error() -> float:
        wide = (grads[0].double(), grads[1].double(), grads[2].double())
        truth = rope_backward_reference(wide, qkv.double(), heads, table, positions)
        pairs = [(one, other) for one, other in zip(run(), truth, strict=True) if other is not None]
        return max(relative_error(one, other) for one, other in pairs if one is not None)

    plain = compiled(rope_backward_reference)
    anchors = {"torch.compile": lambda: plain(grads, qkv, heads, table, positions)}
    return Prepared(run, anchors, error)


def tuning() -> Iterator[Tuning]:
    yield Tuning("size=128,bfloat16", _CANDIDATES, lambda: _prepare(32, 8, True).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
