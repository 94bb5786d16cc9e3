"""Optimizer of all parameters, combining several methods and state locations.

muon     matrices inside the layers -> Muon       the rest -> AdamW
adamw    everything                 -> AdamW, with states in float32, bfloat16 or 8 bits
offload  states and masters in the host's memory: gradients go there, new weights come back
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from cairn.train.config import Optim
from cairn.train.optim.adamw import AdamW
from cairn.train.optim.int8_states import AdamW8
from cairn.train.optim.muon import Cut, Muon, takes
from cairn.train.parallel.whole_matrices import Matrices


class Optimizer(Protocol):
    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        """Change the weights. `number`: 1 for the first step; `factor` NaN: change nothing."""
        ...

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """Role -> path of a parameter -> tensor; all that a checkpoint needs."""
        ...


class MuonWithAdamW:
    """Two optimizers, each with its own parameters."""

    def __init__(self, matrices: Optimizer, rest: Optimizer) -> None:
        self.matrices, self.rest = matrices, rest

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        self.matrices.update(gradients, number, lr, factor)
        self.rest.update(gradients, number, lr, factor)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return self.matrices.tensors() | self.rest.tensors()


class Offloaded:
    """States in the host's memory. Waits for the gradients: the price of the room."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Optim,
        masters: bool,
        seed: int,
        cut: Cut,
        matrices: Matrices | None,
    ) -> None:
        self.parameters = dict(parameters)
        self.home = {name: nn.Parameter(_on_host(p)) for name, p in parameters.items()}
        inner = _replaced(settings)
        self.inner = make_optimizer(self.home, inner, masters, seed, cut, matrices)

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        here = {name: _on_host(gradient) for name, gradient in gradients.items()}
        self.inner.update(here, number, lr, factor.cpu())
        for name, parameter in self.parameters.items():
            parameter.data.copy_(self.home[name].data, non_blocking=True)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        return self.inner.tensors()

    def take_weights(self) -> None:
        """Take over the weights after a checkpoint was read into the parameters."""
        for name, parameter in self.parameters.items():
            self.home[name].data.copy_(parameter.data)


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    settings: Optim,
    masters: bool,
    seed: int,
    cut: Cut,
    matrices: Matrices | None = None,
) -> Optimizer:
    """Create the optimizer. For Muon: `cut` maps tensors to matrices, `matrices` locates their other parts."""
    if settings.offload:
        return Offloaded(parameters, settings, masters, seed, cut, matrices)
    kind = AdamW8 if settings.states == "int8" else AdamW
    if settings.kind == "adamw":
        return kind(parameters, settings, masters, seed)
    inside = {n: p for n, p in parameters.items() if takes(n, p)}
    if not inside:  # a stage whose layers are frozen
        return kind(parameters, settings, masters, seed)
    rest = {n: p for n, p in parameters.items() if n not in inside}
    muon = Muon(inside, settings, masters, cut, matrices)
    return MuonWithAdamW(muon, kind(rest, settings, masters, seed))


def _on_host(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor.detach().clone()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach())


def _replaced(settings: Optim) -> Optim:
    import msgspec

    return msgspec.structs.replace(settings, offload=False)
