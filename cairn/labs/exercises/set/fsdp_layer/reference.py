"""A linear layer whose weight is cut by rows over ranks; ranks are entries of a list."""

import torch


class ShardedLinear:
    def __init__(self, weight_OI: torch.Tensor, ranks: int) -> None:
        """The number of rows divides by the number of ranks."""
        self.ranks = ranks
        self.shards = [part.clone() for part in weight_OI.chunk(ranks)]
        self.gathered = 0  # whole weights that are alive now
        self.inputs: list[torch.Tensor] = []

    def forward(self, x: list[torch.Tensor]) -> list[torch.Tensor]:
        """Each rank's batch through the whole weight, which is alive only meanwhile."""
        # begin answer
        weight_OI = self._gather()
        self.inputs = list(x)
        outputs = [part @ weight_OI.T for part in x]
        self.gathered -= 1  # freed after the forward
        return outputs
        # end answer

    def backward(self, grad_y: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(gradients of the inputs, each rank's shard of the mean gradient of the weight)."""
        # begin answer
        weight_OI = self._gather()
        grad_x = [part @ weight_OI for part in grad_y]
        self.gathered -= 1
        whole = [g.T @ x for g, x in zip(grad_y, self.inputs, strict=True)]
        return grad_x, self._reduce_scatter(whole)
        # end answer

    def _gather(self) -> torch.Tensor:
        self.gathered += 1
        return torch.cat(self.shards)

    def _reduce_scatter(self, whole: list[torch.Tensor]) -> list[torch.Tensor]:
        # begin answer
        total = torch.stack(whole).sum(0)
        return [part / self.ranks for part in total.chunk(self.ranks)]
        # end answer
