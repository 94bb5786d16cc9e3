"""The variants of `linear_cross_entropy` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.cross_entropy import VARIANTS as CROSS_ENTROPY
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.loss.linear_cross_entropy import (
    _BLOCK,
    LOGITS_MIB,
    _key,
    _multiply_kernel,
    cost,
    linear_cross_entropy,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.loss.linear_cross_entropy"


VARIANTS = [
    *CROSS_ENTROPY[:1],  # cross_entropy has all of its forms
    Variant(
        "multiply by a number on the device",
        _multiply_kernel,
        {"values": "*bf16", "factor": "*fp32", "count": "i64"},
        {"BLOCK": _BLOCK},
        {"num_warps": 4},
        ["values"],
    ),
]


SHAPES = [(8192, 4096, 131072), (8192, 4096, 151936)]


def _inputs(tokens: int, width: int, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    x_TD = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight_VD = torch.randn(vocabulary, width, device="cuda", dtype=torch.bfloat16) * width**-0.5
    targets_T = torch.randint(vocabulary, (tokens,), device="cuda")
    return x_TD.requires_grad_(), weight_VD.requires_grad_(), targets_T


def cases() -> Iterator[Case]:
    for shape in SHAPES:
        name = " x ".join(map(str, shape))
        yield Case("linear_cross_entropy", name, "bf16", cost(*shape), lambda s=shape: _prepare(*s))


def _prepare(tokens: int, width: int, vocabulary: int) -> Prepared:
    x_TD, weight_VD, targets_T = _inputs(tokens, width, vocabulary)

    def ours() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(x_TD, weight_VD, targets_T, impl="triton").loss
        return loss.detach(), *torch.autograd.grad(loss, (x_TD, weight_VD))

    def unfused() -> tuple[Tensor, ...]:
        loss = F.cross_entropy(F.linear(x_TD, weight_VD).float(), targets_T)
        return loss.detach(), *torch.autograd.grad(loss, (x_TD, weight_VD))

    def error() -> float:
        """Against float32 over all tokens, a slice of them at a time."""
        loss = torch.zeros((), device="cuda")
        grad_x, grad_weight = (
            torch.empty_like(x_TD),
            torch.zeros_like(weight_VD, dtype=torch.float32),
        )
        wide_VD = weight_VD.detach().float()
        for part in torch.arange(tokens, device="cuda").split(1024):
            x = x_TD.detach()[part].float()
            logits = (x @ wide_VD.T).requires_grad_()
            value = F.cross_entropy(logits, targets_T[part], reduction="sum") / tokens
            [gradient] = torch.autograd.grad(value, logits)
            loss += value.detach()
            grad_x[part] = (gradient @ wide_VD).to(grad_x.dtype)
            grad_weight += gradient.T @ x
        return relative_error(ours(), (loss, grad_x, grad_weight))

    return Prepared(ours, {"unfused": unfused}, error)


def tuning() -> Iterator[Tuning]:
    for shape in SHAPES:

        def prepare(shape: tuple[int, int, int] = shape) -> Callable[[], object]:
            x_TD, weight_VD, targets_T = _inputs(*shape)

            def call() -> object:
                loss = linear_cross_entropy(x_TD, weight_VD, targets_T, impl="triton").loss
                return torch.autograd.grad(loss, (x_TD, weight_VD))

            return call

        sizes = [{"logits_mib": mib} for mib in (384, 512, 704, LOGITS_MIB, 1200)]
        yield Tuning(_key(shape[2], torch.bfloat16), sizes, prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
