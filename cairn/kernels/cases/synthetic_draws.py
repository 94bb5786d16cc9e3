"""Compiled variants and benchmark cases of `synthetic_draws`."""

from collections.abc import Iterator

import torch

from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.sampling.synthetic_draws import (
    GOLDEN,
    LANES,
    _synthetic_kernel,
    cost,
    random_rates,
    synthetic_draws,
    synthetic_draws_reference,
)

KERNEL = "cairn.kernels.sampling.synthetic_draws"
POINTERS = ("rows", "bounds", "draw_bounds", "tokens", "drawn")
VARIANTS = [
    Variant(
        "synthetic draws",
        _synthetic_kernel,
        dict.fromkeys(POINTERS, "*i32") | {"rates": "*fp32", "steps": "*i32", "places": "i32"},
        {"GOLDEN": GOLDEN, "LANES": LANES, "OVERLAP": True},
        {"num_warps": 1},
        (),
    ),
]


def _prepare() -> Prepared:
    drawn, rates_K, steps_N = random_rates(256, 3, "cuda")

    def run() -> None:
        synthetic_draws(drawn, rates_K, steps_N, impl="triton")

    def error() -> float:
        twin, counted_N = drawn._replace(drawn_S=drawn.drawn_S.clone()), steps_N.clone()
        synthetic_draws_reference(twin, rates_K, counted_N)
        run()
        same = torch.equal(drawn.drawn_S, twin.drawn_S) and torch.equal(steps_N, counted_N)
        return 0.0 if same else 1.0

    return Prepared(run, {}, error)


def cases() -> Iterator[Case]:
    yield Case(
        "synthetic draws", "256 rows of 3 drafts", "int32", cost(256, 3), _prepare, graph=True
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
