"""The variant of `lora_slopes` that is compiled and the shapes at which it is measured."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.adapter.lora_slopes import (
    OPTIONS,
    ROWS,
    WIDE,
    _slopes_kernel,
    cost,
    lora_slopes,
    lora_slopes_reference,
)
from cairn.kernels.kernel import Case, Prepared, Variant

KERNEL = "cairn.kernels.adapter.lora_slopes"
RANK = 16
TOKENS = 32768
# q, k and v; gate and up; down: of a 0.6B model.
SHAPES = ((2048, 1024, 1024), (3072, 3072), (1024,))
POINTERS = dict(g="*bf16", b="*bf16", h="*bf16", dh="*bf16", shares="*fp32")
NUMBERS = dict.fromkeys(("columns", "first_1", "first_2", "g_row", "h_row", "dh_row"), "i32")

VARIANTS = [
    Variant(
        f"lora slopes of rank {RANK}",
        _slopes_kernel,
        {**POINTERS, **NUMBERS, "rows": "i32", "scale": "fp32"},
        {"ROWS": ROWS, "WIDE": WIDE, "RANK": RANK, "IEEE": False},
        OPTIONS,
        (*POINTERS, *NUMBERS),
        "wgmma",
    )
]


def cases() -> Iterator[Case]:
    for parts in SHAPES:
        least = cost(TOKENS, sum(parts), RANK, len(parts))
        shape = f"{TOKENS} x {sum(parts)}, {len(parts)} parts"
        yield Case("lora_slopes", shape, "bf16", least, lambda p=parts: _prepare(p))


def _prepare(parts: tuple[int, ...]) -> Prepared:
    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)

    g_MN, b_NR = drawn(TOKENS, sum(parts)), drawn(sum(parts), RANK)
    h_MR, wide_NR = drawn(TOKENS, RANK * len(parts)), drawn(sum(parts), RANK * len(parts))
    exact = lora_slopes_reference(g_MN.double(), b_NR.double(), h_MR.double(), parts, 2.0)

    def error() -> float:
        found = lora_slopes(g_MN, b_NR, h_MR, parts, 2.0, impl="triton")
        return max(relative_error(a, b) for a, b in zip(found, exact, strict=True))

    return Prepared(
        lambda: lora_slopes(g_MN, b_NR, h_MR, parts, 2.0, impl="triton"),
        {"cuBLAS": lambda: (g_MN @ wide_NR, g_MN.T @ h_MR)},
        error,
    )


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
