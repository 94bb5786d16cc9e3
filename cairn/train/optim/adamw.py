"""AdamW over all parameters at once, in the three ways to keep them that `kernels.adamw` knows.

    on a GPU                        our kernel: one launch per group, clips on the way, skips a bad step by itself
    on a CPU, float32 or masters    torch's fused form: the plain one
    on a CPU, bfloat16 states       the kernel's reference

States are plain tensors by the path of their parameter and of its shape, so a checkpoint can cut them like weights.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cairn.kernels.optim.adamw import State, Step, adamw
from cairn.train.config import Optim


class AdamW:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Optim,
        masters: bool,
        seed: int = 0,
    ) -> None:
        """`masters`: keep a float32 copy of weights that have 16 bits."""
        self.parameters, self.settings, self.seed = dict(parameters), settings, seed
        kept = torch.bfloat16 if settings.states == "bfloat16" else torch.float32
        self.m = {n: torch.zeros_like(p, dtype=kept) for n, p in self.parameters.items()}
        self.v = {n: torch.zeros_like(p, dtype=kept) for n, p in self.parameters.items()}
        narrow = masters and any(p.dtype != torch.float32 for p in self.parameters.values())
        self.masters = {n: p.detach().float() for n, p in self.parameters.items()} if narrow else {}

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        """`number`: 1 for the first step. `factor` multiplies the gradients; NaN changes nothing."""
        for decay, names in by_decay(self.parameters).items():
            names = [name for name in names if name in gradients]
            if not names:
                continue
            step = Step(
                number,
                lr,
                self.settings.beta1,
                self.settings.beta2,
                self.settings.eps,
                self.settings.weight_decay if decay else 0.0,
                self.seed + decay,
            )
            grads = [gradients[name] for name in names]
            if not grads[0].is_cuda and self.m[names[0]].dtype == torch.float32:
                self._by_torch(names, grads, step, factor)
            else:
                adamw(self._state(names, grads), step, factor)

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """State to save: role -> path -> tensor."""
        return {"m": self.m, "v": self.v} | ({"master": self.masters} if self.masters else {})

    def _state(self, names: list[str], grads: list[Tensor]) -> State:
        return State(
            [self.parameters[name].data for name in names],
            [grad.contiguous() for grad in grads],
            [self.m[name] for name in names],
            [self.v[name] for name in names],
            [self.masters[name] for name in names] if self.masters else None,
        )

    def _by_torch(self, names: list[str], grads: list[Tensor], step: Step, factor: Tensor) -> None:
        weights = [self.masters.get(name, self.parameters[name].data) for name in names]
        fused: Any = torch._fused_adamw_
        fused(
            weights,
            [grad.float() for grad in grads],
            [self.m[name] for name in names],
            [self.v[name] for name in names],
            [],
            [torch.tensor(float(step.number)) for _ in names],
            lr=step.lr,
            beta1=step.beta1,
            beta2=step.beta2,
            weight_decay=step.weight_decay,
            eps=step.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=factor.float().reciprocal(),
            found_inf=(~factor.isfinite()).float(),
        )
        for name in names if self.masters else ():
            self.parameters[name].data.copy_(self.masters[name])


def by_decay(parameters: Mapping[str, Tensor]) -> dict[bool, list[str]]:
    """Matrices that shrink a little at each step, and all that does not: norms, biases, embeddings."""
    groups: dict[bool, list[str]] = {True: [], False: []}
    for name, parameter in parameters.items():
        is_table = name.startswith(("embedding.", "position_embedding."))
        groups[is_matrix(name, parameter) and not is_table].append(name)
    return groups


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix. The stacked biases of all experts are vectors."""
    return parameter.dim() > 1 and "bias" not in name.rpartition(".")[2]
