"""The variants of `adamw` that are compiled and the shapes at which it is measured and tuned."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cairn.kernels.accuracy import relative_error
from cairn.kernels.kernel import Case, Prepared, Variant
from cairn.kernels.optim.adamw import (
    NARROW,
    WIDE,
    State,
    Step,
    _adamw_kernel,
    adamw,
    adamw_reference,
    cost,
    key_of,
)
from cairn.kernels.optim.grad_norm import TYPES
from cairn.kernels.optim.tensor_table import CHUNK
from cairn.kernels.tuned import Tuning

KERNEL = "cairn.kernels.optim.adamw"


_TYPES: Mapping[str, tuple[torch.dtype, torch.dtype, torch.dtype, bool]] = {
    "fp32": (torch.float32, torch.float32, torch.float32, False),
    "bf16 + fp32 masters": (torch.bfloat16, torch.bfloat16, torch.float32, True),
    "bf16, stochastic": (torch.bfloat16, torch.bfloat16, torch.bfloat16, False),
}


_CANDIDATES = [{"block": b, "warps": w, "stages": s} for b, w, s in
               ((1024, 4, 1), (512, 4, 1), (2048, 8, 1), (2048, 4, 1), (1024, 4, 2), (1024, 4, 3), (4096, 8, 2))
               ]  # fmt: skip


def _variant(name: str, how: Mapping[str, int]) -> Variant:
    weight, grad, state, masters = _TYPES[name]
    pointers = {"addresses": "*i64", "sizes": "*i64", "numbers": "*i32", "scale": "*fp32"}
    pointers |= {"tensor_of": "*i32", "chunk_of": "*i32"}
    floats = dict.fromkeys(("beta1", "beta2", "eps", "kept", "step_size", "root"), "fp32")
    return Variant(
        f"adamw {name}, {dict(how)}",
        _adamw_kernel,
        pointers | {"tensors": "i32", "key": "i32"} | floats,
        {"W": TYPES[weight], "G": TYPES[grad], "S": TYPES[state], "MASTERS": masters}
        | {"ALIGNED": True, "CHUNK": CHUNK, "BLOCK": how["block"], "STAGES": how["stages"]},
        {"num_warps": how["warps"]},
        list(pointers),
    )


VARIANTS = [
    _variant("fp32", WIDE),
    _variant("bf16, stochastic", NARROW),
    _variant("bf16 + fp32 masters", WIDE),
]


_SHAPES = [(4096, 4096)] * 16 + [(4096,)] * 33


def cases() -> Iterator[Case]:
    elements = sum(math.prod(shape) for shape in _SHAPES)
    for name, (weight, grad, state, masters) in _TYPES.items():
        sizes = (weight.itemsize, grad.itemsize, state.itemsize)
        yield Case(
            f"adamw {name}",
            "268M",
            "fp32" if name == "fp32" else "bf16",
            cost(elements, *sizes, masters),
            lambda name=name: _prepare(name),
        )


def _random_state(name: str, device: str) -> State:
    weight, grad, state, masters = _TYPES[name]

    def random(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape, device=device).abs().to(dtype) for shape in _SHAPES]

    return State(
        random(weight), random(grad), random(state), random(state),
        random(torch.float32) if masters else None,
    )  # fmt: skip


def _prepare(name: str) -> Prepared:
    state, step = _random_state(name, "cuda"), Step(3, 1e-3, weight_decay=0.1, seed=7)
    scale = torch.tensor(0.5, device="cuda")

    def error() -> float:
        few = [0, 16]  # a matrix and a vector
        before = {
            role: [tensors[i].clone() for i in few] for role, tensors in state.roles().items()
        }
        after = {role: [tensors[i] for i in few] for role, tensors in state.roles().items()}
        adamw(State(**after), step, scale, impl="triton")
        adamw_reference(State(**before), step, scale)
        return max(relative_error(after[role], before[role]) for role in after)

    return Prepared(
        lambda: adamw(state, step, scale, impl="triton"), {"torch fused": _fused(state)}, error
    )


def _fused(state: State) -> Any:
    """torch's own, which has no masters: it updates them alone, from gradients of their type."""
    weights, grads = state.weights, state.grads
    if state.masters is not None:
        weights, grads = state.masters, [grad.float() for grad in state.grads]
    roles: Any = [list(role) for role in (weights, grads, state.m, state.v, [])]
    steps = [torch.tensor(3.0, device=weights[0].device) for _ in weights]
    options: Any = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    options |= {"amsgrad": False, "maximize": False}
    update: Any = torch._fused_adamw_
    return lambda: update(*roles, steps, **options)


def tuning() -> Iterator[Tuning]:
    for name, (weight, grad, state, masters) in _TYPES.items():
        place = key_of((weight, grad, state), masters)
        yield Tuning(place, _CANDIDATES, lambda name=name: _prepare(name).ours)


if __name__ == "__main__":
    from cairn.kernels.tooling.demo import demo

    demo(__spec__.name)
