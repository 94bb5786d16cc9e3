"""The variants of `gate_backward` that are compiled and the shapes at which it is measured."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.experts.gate_backward import (
    _gate_backward_kernel,
    cost,
    gate_backward,
    gate_backward_reference,
)
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.experts.gate_backward"
_TYPES = dict(grad="*bf16", inner="*bf16", order="*i32", weights="*fp32", d_inner="*bf16")
_TYPES |= dict(weighed="*bf16", d_weights="*fp32")

VARIANTS = [
    Variant(
        "gate backward of 768 columns",
        _gate_backward_kernel,
        _TYPES,
        dict(COLUMNS=768, WIDTH=1024),
        {"num_warps": 4},
        tuple(_TYPES),
    )
]


def cases() -> Iterator[Case]:
    for tokens in (1024, 8192):
        name = f"{tokens} x 8 of 768"
        work = cost(8 * tokens, 768)
        yield Case("gate_backward", name, "bf16", work, lambda t=tokens: _prepare(t))


def _prepare(tokens: int, per_token: int = 8, columns: int = 768) -> Prepared:
    pairs = tokens * per_token
    grad = torch.randn(pairs, columns, device="cuda").to(torch.bfloat16)
    inner = torch.randn(pairs, 2 * columns, device="cuda").to(torch.bfloat16)
    order = torch.randperm(pairs, device="cuda").int()
    weights = torch.rand(tokens, per_token, device="cuda")

    def error() -> float:
        exact = gate_backward_reference(grad.double(), inner.double(), order, weights)
        found = gate_backward(grad, inner, order, weights, impl="triton")
        return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))

    return Prepared(lambda: gate_backward(grad, inner, order, weights, impl="triton"), {}, error)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
