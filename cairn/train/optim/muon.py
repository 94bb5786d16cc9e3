"""Muon: the update of a matrix is its momentum made orthogonal, so that no direction is favoured.

    momentum  b = mu * b + g;   u = g + mu * b (Nesterov)
    u = U S V^T  ->  about U V^T, by five Newton-Schulz steps: products only, all matrices of one shape at once
    w = w (1 - lr * decay) - lr * 0.2 * sqrt(max(rows, columns)) * u           the size of AdamW's updates
                                                                               (arXiv:2502.16982)
For the matrices inside the layers; embeddings, head, norms and routers go to AdamW. Joined projections (q, k, v in one
parameter) are taken apart first: the result does not depend on how a layer is stored. Where ranks hold parts of a
matrix, each puts the whole momentum together and takes its part of the update. A matrix without a gradient stays as it
is, with its momentum.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from cairn.core.errors import ConfigError
from cairn.train.checkpoint.piece import Piece
from cairn.train.config import Optim
from cairn.train.optim.adamw import is_matrix
from cairn.train.parallel.whole_matrices import Matrices, Matrix, batches, place, put_together

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


def takes(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates this parameter."""
    return is_inside(name) and is_matrix(name, parameter)


def is_inside(name: str) -> bool:
    """Return whether the parameter belongs to a layer and is not a router."""
    return name.startswith("layers.") and ".router." not in name


class Muon:
    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Optim,
        masters: bool,
        cut: Cut,
        matrices: Matrices | None = None,
    ) -> None:
        """`matrices`: of which ranks hold parts; without it every matrix has to be here, whole."""
        self.parameters, self.settings, self.cut = dict(parameters), settings, cut
        self.momentum = {n: torch.zeros_like(p, dtype=torch.float32) for n, p in parameters.items()}
        narrow = masters and any(p.dtype != torch.float32 for p in self.parameters.values())
        self.masters = {n: p.detach().float() for n, p in self.parameters.items()} if narrow else {}
        inside = {n: m for n, m in (matrices or {}).items() if is_inside(m.parameter)}
        inside_matrices = {n: m for n, m in inside.items() if len(m.shape) > 1}
        self.matrices = inside_matrices or _all_here(cut(self.momentum))
        self.batches = batches(self.matrices, TOGETHER)
        self.device = next(iter(self.momentum.values())).device

    def update(
        self, gradients: Mapping[str, Tensor], number: int, lr: float, factor: Tensor
    ) -> None:
        fine = factor.isfinite()
        scaled = {
            n: torch.where(fine, gradients[n].float() * factor, 0.0)
            for n in self.parameters
            if n in gradients
        }
        mu = self.settings.momentum
        for name, g in scaled.items():
            kept = self.momentum[name]
            kept.copy_(torch.where(fine, kept * mu + g, kept))
            g.add_(kept, alpha=mu)
        size = torch.where(fine, lr, 0.0)
        weights = self.masters or {n: p.data for n, p in self.parameters.items()}
        updates, targets = self.cut(scaled), self.cut({n: weights[n] for n in scaled})
        for names in self.batches:
            like = self.matrices[names[0]]
            if not like.groups:  # with other ranks all take part, with zeros for what is not there
                names = [name for name in names if name in updates]
            if not names:
                continue
            parts = [updates.get(name) for name in names]
            whole_NRC = put_together(like, parts, self.device)
            self._apply([targets.get(name) for name in names], orthogonal(whole_NRC), size)
        for name in self.masters:
            self.parameters[name].data.copy_(self.masters[name])

    def _apply(self, weights: list[Piece | None], direction_NRC: Tensor, size: Tensor) -> None:
        scale = 0.2 * max(direction_NRC.shape[-2:]) ** 0.5
        for weight, direction_RC in zip(weights, direction_NRC, strict=True):
            if weight is not None:
                kept = weight.tensor.float() * (1 - size * self.settings.weight_decay)
                weight.tensor.copy_(kept - size * scale * direction_RC[place(weight)].float())

    def tensors(self) -> dict[str, dict[str, Tensor]]:
        states = {"momentum": self.momentum}
        return states | ({"muon_master": self.masters} if self.masters else {})


def _all_here(pieces: Mapping[str, Piece]) -> Matrices:
    for name, piece in pieces.items():
        if tuple(piece.tensor.shape) != piece.shape:
            raise ConfigError(
                f"Muon needs whole matrices, but this rank has {list(piece.tensor.shape)} of "
                f"{list(piece.shape)} of {name}",
                hint="say which ranks hold the other parts, or use optim.kind adamw",
            )
    return {name: Matrix(name, piece.shape) for name, piece in pieces.items()}
