"""The gradients of some parameters, wherever they are at the moment: on the parameter, or in a float32 sum.

Weights of 16 bits have gradients of 16 bits. Where several are added (microbatches, ranks) they are added in float32,
because a small addend to a large sum of 16 bits is lost. This is the one place that does so.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def as_it_is(gradient: Any) -> Tensor:
    return gradient


class Gradients:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], local: Callable[[Any], Tensor] = as_it_is
    ) -> None:
        """`local`: what of a parameter's gradient is on this rank."""
        self.parameters, self.local = dict(parameters), local
        self.sums: dict[str, Tensor] = {}  # float32, for parameters of 16 bits

    @torch.no_grad()
    def collect(self) -> None:
        """Adds what a backward has left to the sums in float32."""
        for name, parameter in self.parameters.items():
            if parameter.grad is None or parameter.dtype in (torch.float32, torch.float64):
                continue
            fresh = self.local(parameter.grad)
            if name in self.sums:
                self.sums[name].add_(fresh)
            else:
                self.sums[name] = fresh.float()
            parameter.grad = None

    def get(self, name: str) -> Tensor | None:
        if name in self.sums:
            return self.sums[name]
        gradient = self.parameters[name].grad
        return None if gradient is None else self.local(gradient)

    def put(self, name: str, gradient: Tensor | None) -> None:
        parameter = self.parameters[name]
        if gradient is None or gradient.dtype == parameter.dtype:
            parameter.grad = gradient
            self.sums.pop(name, None)
        else:
            parameter.grad = None
            self.sums[name] = gradient

    def or_zeros(self, name: str) -> Tensor:
        """A parameter that nothing depended on has no gradient here, and may have one on another rank."""
        gradient = self.get(name)
        if gradient is not None:
            return gradient
        parameter = self.parameters[name]
        wide = torch.float32 if parameter.dtype != torch.float64 else torch.float64
        return torch.zeros_like(parameter, dtype=wide)

    def found(self) -> dict[str, Tensor]:
        all_of = ((name, self.get(name)) for name in self.parameters)
        return {name: gradient for name, gradient in all_of if gradient is not None}

    def clear(self) -> None:
        self.sums.clear()
        for parameter in self.parameters.values():
            parameter.grad = None
