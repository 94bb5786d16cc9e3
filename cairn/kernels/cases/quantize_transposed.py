"""The variants of `quantize_transposed` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.arguments import short
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.quantize.quantize_transposed import (
    E4M3,
    E5M2,
    LIMITS,
    _transpose_kernel,
    cost,
    quantize_transposed,
    quantize_transposed_reference,
)
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.quantize.quantize_transposed"


def _variant(kind: str, both: bool, dynamic: bool) -> Variant:
    types = {"x": "*bf16", "transposed": f"*{kind}", "scale": "*fp32", "largest": "*fp32"}
    types |= {"values": f"*{kind}"} if both else {}
    nothing = {} if both else {"values": None}
    limit = LIMITS[E4M3 if kind == "fp8e4nv" else E5M2]
    return Variant(
        f"turn {kind}{', both' * both}{', scale found' * dynamic}",
        _transpose_kernel,
        types | {"rows": "i32", "columns": "i32", "parts": "i32"},
        nothing | {"LIMIT": limit, "PARTS": 1024 * dynamic, "BM": 128, "BN": 64},
        {"num_warps": 8},
        [*types, "rows", "columns"],
    )


VARIANTS = [
    _variant("fp8e4nv", both=False, dynamic=False),
    _variant("fp8e4nv", both=True, dynamic=True),
    _variant("fp8e5", both=True, dynamic=True),
]


_ROWS, _COLUMNS = 32768, 6144


def cases() -> Iterator[Case]:
    for name, dtype, both in (("e4m3", E4M3, False), ("e5m2", E5M2, True)):
        yield Case(
            f"quantize transposed {name}{' both' * both}",
            f"{_ROWS} x {_COLUMNS}",
            "bf16",
            cost(_ROWS * _COLUMNS, both, dynamic=True),
            lambda dtype=dtype, both=both: _prepare(dtype, both),
        )


def _prepare(dtype: torch.dtype, both: bool) -> Prepared:
    x = torch.randn(_ROWS, _COLUMNS, device="cuda").bfloat16()
    plain = compiled(quantize_transposed_reference)

    def error() -> float:
        found = quantize_transposed(x, None, dtype, both=both, impl="triton")
        wanted = quantize_transposed_reference(x, None, dtype, both)
        return relative_error(found.transposed.float(), wanted.transposed.float())

    return Prepared(
        lambda: quantize_transposed(x, None, dtype, both=both, impl="triton"),
        {"torch.compile": lambda: plain(x, None, dtype, both)},
        error,
    )


def tuning() -> Iterator[Tuning]:
    ideas = [{"block_m": m, "block_n": n, "warps": w}
             for m, n, w in ((128, 64, 8), (128, 64, 4), (64, 64, 4), (128, 128, 8), (256, 32, 8), (64, 128, 8))
             ]  # fmt: skip
    for dtype in (E4M3, E5M2):
        yield Tuning(short(dtype), ideas, lambda dtype=dtype: _prepare(dtype, True).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
