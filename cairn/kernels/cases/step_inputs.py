"""The variants of `step_inputs` that are compiled and the shapes at which it is measured and tuned."""

from collections.abc import Iterator
from functools import partial

import torch

from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.paged.step_inputs import (
    BLOCK,
    Inputs,
    cost,
    decode_step,
    step_inputs,
    step_inputs_reference,
)
from cairn.kernels.paged.step_inputs_kernel import _inputs_kernel, _keep_kernel

KERNEL = "cairn.kernels.paged.step_inputs"


VARIANTS = [
    Variant(
        "inputs of a step, pages of 64",
        _inputs_kernel,
        dict.fromkeys(
            ("rows", "starts", "bounds", "first_pages", "page_bounds", "pages", "given", "table",
             "last_tokens", "kept_lengths", "tokens", "positions", "slots", "lengths", "tables"), "*i32"
        ) | dict.fromkeys(
            ("table_stride", "tables_stride", "table_group", "slots_group", "tables_group"), "i32"
        ),
        {"PAGE": 64, "BLOCK": BLOCK, "GROUPS": 6, "OVERLAP": True},
        {"num_warps": 2},
        (),
    ),
    Variant(
        "sampled tokens kept",
        _keep_kernel,
        dict.fromkeys(("last_tokens", "tokens", "rows"), "*i32") | {"count": "i32"},
        {"BLOCK": BLOCK, "OVERLAP": True},
        {"num_warps": 2},
        (),
    ),
]  # fmt: skip


def _prepare(groups: int) -> Prepared:
    decided, state, page_size, room = decode_step(256, 4096, 64, "cuda", groups)

    def error() -> float:
        wanted = Inputs(*(torch.full_like(tensor, -7) for tensor in room))
        step_inputs_reference(decided, state, page_size, wanted)
        for tensor in room:
            tensor.fill_(-7)
        run()
        same = all(torch.equal(a, b) for a, b in zip(room, wanted, strict=True))
        return 0.0 if same else 1.0

    def run() -> None:
        step_inputs(decided, state, page_size, room, impl="triton")

    return Prepared(run, {}, error)


def cases() -> Iterator[Case]:
    for groups in (1, 6):
        what = f"256 sequences of 4096, {groups} cache groups"
        price = cost(256, 256, groups * 256 * 64)
        yield Case("step inputs", what, "int32", price, partial(_prepare, groups), graph=True)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
