"""Compiled variants and benchmark cases of `accept_tokens`."""

from collections.abc import Iterator

import torch

from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.paged.step_inputs import State
from cairn.kernels.sampling.accept_tokens import (
    LANES,
    accept_tokens,
    accept_tokens_reference,
    cost,
    random_draws,
)
from cairn.kernels.sampling.accept_tokens_kernel import _accept_kernel

KERNEL = "cairn.kernels.sampling.accept_tokens"
ARGUMENTS = (
    "rows",
    "bounds",
    "draw_bounds",
    "tokens",
    "positions",
    "drawn",
    "last_tokens",
    "lengths",
)
VARIANTS = [
    Variant(
        "drafts accepted",
        _accept_kernel,
        dict.fromkeys(ARGUMENTS, "*i32"),
        {"LANES": LANES, "OVERLAP": True},
        {"num_warps": 1},
        (),
    ),
]


def _prepare() -> Prepared:
    drawn, state = random_draws(256, 3, "cuda")

    def run() -> None:
        accept_tokens(drawn, state, impl="triton")

    def error() -> float:
        wanted = State(*(tensor.clone() for tensor in state))
        accept_tokens_reference(drawn, wanted)
        run()
        same = all(torch.equal(a, b) for a, b in zip(state, wanted, strict=True))
        return 0.0 if same else 1.0

    return Prepared(run, {}, error)


def cases() -> Iterator[Case]:
    yield Case("accept tokens", "256 rows of 3 drafts", "int32", cost(256, 3), _prepare, graph=True)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
