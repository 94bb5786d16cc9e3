"""Momentum SGD whose state is cut over ranks."""

import torch


class ZeroOne:
    def __init__(self, weights: torch.Tensor, ranks: int, lr: float, momentum: float) -> None:
        """`weights` is flat; its length need not divide by the number of ranks."""
        self.weights, self.ranks, self.lr, self.momentum = weights.clone(), ranks, lr, momentum
        # begin answer
        self.slice = -(-len(weights) // ranks)
        self.velocity = [torch.zeros(self.slice) for _ in range(ranks)]
        # end answer

    def step(self, grads: list[torch.Tensor]) -> None:
        """One gradient from each rank; afterwards `weights` is what every rank has."""
        # begin answer
        padding = self.slice * self.ranks - len(self.weights)
        padded = [torch.nn.functional.pad(grad, (0, padding)) for grad in grads]
        parts = []
        for rank in range(self.ranks):
            begin, end = rank * self.slice, (rank + 1) * self.slice
            mean = sum(grad[begin:end] for grad in padded) / self.ranks
            self.velocity[rank] = self.momentum * self.velocity[rank] + mean
            parts.append(self.lr * self.velocity[rank])
        self.weights -= torch.cat(parts)[: len(self.weights)]
        # end answer
