"""The variants of `cross_entropy` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.loss.cross_entropy import _key, cost, cross_entropy_
from cairn.kernels.loss.cross_entropy_plans import (
    CANDIDATES,
    PIECES,
    Plan,
    loop_variant,
    pieces_variant,
)
from cairn.kernels.loss.cross_entropy_rule import Rule, cross_entropy_reference
from cairn.kernels.tuned import Tuning, numbers_of, shipped

KERNEL = "cairn.kernels.loss.cross_entropy"


SHAPES = [(4096, 128256), (8192, 151936)]


VARIANTS = [
    *(pieces_variant(plan, 128256) for plan in CANDIDATES if plan.kernel == "pieces"),
    pieces_variant(PIECES, 151936),
    pieces_variant(PIECES, 1000),
    loop_variant(forward=True, backward=False),
    loop_variant(forward=False, backward=True),
    loop_variant(forward=True, backward=True),
    loop_variant(forward=True, backward=True, smooth=True),
    loop_variant(forward=True, backward=False, raw=True),
    loop_variant(forward=False, backward=True, weighed=True),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("cross_entropy"):
        if how["kernel"] == "pieces":
            yield pieces_variant(Plan(**how), numbers_of(entry)["columns"])


def _inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    logits_TV = 3 * torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    targets_T = torch.randint(columns, (rows,), device="cuda")
    targets_T[::17] = -100
    return logits_TV, targets_T


def cases() -> Iterator[Case]:
    for rows, columns in SHAPES:
        shape = f"{rows} x {columns}"
        bytes_and_flops = cost(rows, columns)
        yield Case(
            "cross_entropy", shape, "bf16", bytes_and_flops, lambda s=(rows, columns): _prepare(*s)
        )


def _prepare(rows: int, columns: int) -> Prepared:
    logits_TV, targets_T = _inputs(rows, columns)
    scale = torch.full((1,), 1.0 / rows, device="cuda")
    compiled = torch.compile(lambda logits, targets: F.cross_entropy(logits.float(), targets))
    leaf_TV = logits_TV.clone().requires_grad_()

    def error() -> float:
        """Error of the loss and of the gradient of some rows, which limits the memory of the reference."""
        few = slice(None, None, max(1, rows // 256))
        exact_TV = logits_TV[few].double().requires_grad_()
        truth = cross_entropy_reference(exact_TV, targets_T[few], Rule(z_loss=1e-4))
        [gradient] = torch.autograd.grad(truth.loss_T.sum() / rows, exact_TV)
        ours_TV = logits_TV.clone()
        losses = cross_entropy_(ours_TV, targets_T, grad_scale=scale, z_loss=1e-4, impl="triton")
        found = (losses.loss_T[few], losses.lse_T[few], ours_TV[few])
        return relative_error(found, (truth.loss_T.detach(), truth.lse_T.detach(), gradient))

    return Prepared(
        # The logits become their own gradient; that they do so again and again takes as long every time.
        lambda: cross_entropy_(logits_TV, targets_T, grad_scale=scale, z_loss=1e-4, impl="triton"),
        {"torch.compile": lambda: torch.autograd.grad(compiled(leaf_TV, targets_T), leaf_TV)},
        error,
    )


def tuning() -> Iterator[Tuning]:
    for rows, columns in SHAPES:

        def prepare(rows: int = rows, columns: int = columns) -> Callable[[], object]:
            logits_TV, targets_T = _inputs(rows, columns)
            room_TV = torch.empty_like(logits_TV)

            def call() -> object:
                """Every candidate on the same logits; copying them takes each as long."""
                losses = cross_entropy_(room_TV.copy_(logits_TV), targets_T, impl="triton")
                return *losses, room_TV[:64]

            return call

        key = _key(columns, torch.bfloat16)
        yield Tuning(key, [plan._asdict() for plan in CANDIDATES], prepare)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
