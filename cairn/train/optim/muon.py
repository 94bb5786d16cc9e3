"""Muon: the update of a matrix is its momentum made orthogonal, so that no direction is favoured.

    momentum  b = mu * b + g;   u = g + mu * b (Nesterov)
    u = U S V^T  ->  about U V^T, by five Newton-Schulz steps: products only, all matrices of one shape at once
    w = w (1 - lr * decay) - lr * 0.2 * sqrt(max(rows, columns)) * u           the size of AdamW's updates
                                                                               (arXiv:2502.16982)
For the matrices inside the layers; embeddings, head, norms and routers go to AdamW. Joined projections (q, k, v in one
parameter) are taken apart first: the result does not depend on how a layer is stored. Needs whole matrices.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.train.checkpoint.piece import Piece
from cairn.train.config import Optim

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # steep at 0: small singular values grow fast
STEPS = 5
TOGETHER = 1 << 28  # elements of one batch of matrices: bounds the memory of the iteration

Cut = Callable[[Mapping[str, Tensor]], dict[str, Piece]]  # tensors by path -> matrices by name


def orthogonal(x_NRC: Tensor, steps: int = STEPS) -> Tensor:
    """Each matrix with its singular values moved near 1; in bfloat16 on a GPU."""
    a, b, c = COEFFICIENTS
    x = x_NRC.bfloat16() if x_NRC.is_cuda else x_NRC
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon takes this parameter."""
    inside = name.startswith("layers.") and ".router." not in name
    return inside and parameter.dim() > 1


class Muon:
    def __init__(
        self, parameters: Mapping[str, nn.Parameter], settings: Optim, masters: bool, cut: Cut
    ) -> None:
        self.parameters, self.settings, self.cut = dict(parameters), settings, cut
        self.momentum = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in parameters.items()}
        narrow = masters and any(p.dtype != torch.float32 for p in self.parameters.values())
        self.masters = {n: p.detach().float() for n, p in self.parameters.items()} if narrow else {}
        for name, piece in cut(self.momentum).items():
            if tuple(piece.tensor.shape) != piece.shape:
                raise ConfigError(
                    f"Muon needs whole matrices, but this rank has {list(piece.tensor.shape)} of "
                    f"{list(piece.shape)} of {name}",
                    hint="use optim.kind adamw with tp or fsdp, or dp alone",
                )

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        fine = factor.isfinite()
        scaled = {n: torch.where(fine, gradients[n].float() * factor, 0.0) for n in self.parameters}
        mu = self.settings.momentum
        for name, g in scaled.items():
            kept = self.momentum[name]
            kept.copy_(torch.where(fine, kept * mu + g, kept))
            g.add_(kept, alpha=mu)
        size = torch.where(fine, lr, 0.0)
        weights = self.masters or {n: p.data for n, p in self.parameters.items()}
        updates, targets = self.cut(scaled), self.cut(weights)
        for names in by_shape({name: piece.tensor for name, piece in updates.items()}):
            self._apply(
                [updates[n].tensor for n in names], [targets[n].tensor for n in names], size
            )
        for name in self.masters:
            self.parameters[name].data.copy_(self.masters[name])

    def _apply(self, updates: Sequence[Tensor], weights: Sequence[Tensor], size: Tensor) -> None:
        directions = orthogonal(torch.stack(list(updates)))
        scale = 0.2 * max(directions.shape[-2:]) ** 0.5
        for weight, direction in zip(weights, directions, strict=True):
            kept = weight.float() * (1 - size * self.settings.weight_decay)
            weight.copy_(kept - size * scale * direction.float())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        states = {"momentum": self.momentum}
        return states | ({"muon_master": self.masters} if self.masters else {})


def by_shape(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of equal shapes side by side, in batches that are not too large."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tuple(tensor.shape), []).append(name)
    batches = []
    for shape, names in groups.items():
        most = max(1, TOGETHER // (shape[0] * shape[1]))
        batches += [names[i : i + most] for i in range(0, len(names), most)]
    return batches
