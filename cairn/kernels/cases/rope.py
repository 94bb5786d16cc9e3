"""The variants of `rope` that are compiled and the shapes at which it is measured and tuned."""

import functools
from collections.abc import Iterator

import torch

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.anchors import compiled
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.layer.rope import (
    CANDIDATES,
    DEFAULT,
    cost,
    key,
    launch_rope,
    random_inputs,
    rope_reference,
    variant,
)
from cairn.kernels.layer.rope_backward import Heads
from cairn.kernels.tuned import Tuning, numbers_of, shipped, tuned

KERNEL = "cairn.kernels.layer.rope"


VARIANTS = [
    variant(128, 32, 8, DEFAULT, True, ""),
    variant(128, 32, 8, DEFAULT, False, ""),
    variant(64, 14, 2, DEFAULT, False, ""),
    variant(96, 32, 32, DEFAULT, False, ""),
    variant(256, 8, 4, DEFAULT, True, ""),
]


def tuned_variants() -> Iterator[Variant]:
    for entry, how in shipped("rope"):
        yield variant(numbers_of(entry)["size"], 32, 8, how, True, "")


_TOKENS = 16384


def cases() -> Iterator[Case]:
    for q, kv, normed in ((32, 8, True), (32, 8, False), (16, 8, True)):
        yield Case(
            f"rope{' + qk-norm' * normed}",
            f"{_TOKENS} tokens, {q}/{kv} heads x 128",
            "bf16",
            cost(_TOKENS, Heads(q, kv), 128),
            functools.partial(_prepare, q, kv, normed),
            graph=True,
        )


def _prepare(q: int, kv: int, normed: bool) -> Prepared:
    inputs = random_inputs(_TOKENS, q, kv, normed)
    out_q = torch.empty(_TOKENS, q, 128, dtype=torch.bfloat16, device="cuda")
    out_k = torch.empty(_TOKENS, kv, 128, dtype=torch.bfloat16, device="cuda")

    def run() -> None:
        how = tuned("rope", key(128, torch.bfloat16), DEFAULT)
        launch_rope(how, *inputs, out_q, out_k, None)

    def error() -> float:
        poison(out_q, out_k)
        run()
        truth = rope_reference(inputs.qkv.double(), *inputs[1:])
        return relative_error((out_q, out_k), truth[:2])

    plain = compiled(rope_reference)
    return Prepared(run, {"torch.compile": lambda: plain(*inputs)[:2]}, error)


def tuning() -> Iterator[Tuning]:
    yield Tuning(key(128, torch.bfloat16), CANDIDATES, lambda: _prepare(32, 8, True).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
