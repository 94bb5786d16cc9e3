"""One process, one model: the plain form of `interface.Parallel`, which the others are held against.

Microbatches run one after another and their gradients add up. Weights of 16 bits have gradients of 16 bits; with more
than one microbatch these are added in float32, because a small addend to a large sum of 16 bits is lost; unless memory
is so short that there are no float32 masters either.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from cairn.kernels.optim.grad_norm import square_sum
from cairn.models.attend import Attend, Packed
from cairn.models.transformer import Transformer
from cairn.train.checkpoint.piece import Piece, pieces_of
from cairn.train.parallel.interface import Loss
from cairn.train.parallel.whole_matrices import Matrices, all_here

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

Forward = Callable[[Tensor, Tensor, Attend], Tensor]  # tokens, positions, attend -> hidden [T, D]


def packed(batch: "Batch") -> Attend:
    """Attention by torch, one document after another."""
    return Packed(batch.lengths, batch.tokens_T.device)


class Alone:
    data_rank = 0
    data_ranks = 1

    def __init__(
        self,
        model: Transformer,
        forward: Forward | None = None,
        attend: "Callable[[Batch], Attend]" = packed,
        wide_sums: bool = True,
    ) -> None:
        """`forward`: another form of the same model, over the same parameters. `wide_sums`: add in float32."""
        self.model, self.forward, self.attend = model, forward or model, attend
        self.wide_sums = wide_sums
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.slots = list(model.slots())
        self.sums: dict[str, Tensor] = {}  # float32 gradients, where several of 16 bits are added

    def forward_backward(self, batches: "Sequence[Batch]", loss: Loss, valid: Tensor) -> Tensor:
        total = torch.zeros((), device=valid.device)
        vocabulary = self.model.head or self.model.embedding
        for batch in batches:
            hidden_TD = self.forward(batch.tokens_T, batch.positions_T, self.attend(batch))
            share = loss(hidden_TD, vocabulary, batch, valid)
            share.backward()
            total += share.detach()
            if len(batches) > 1 and self.wide_sums:
                self._add_in_float32()
        return total

    def sum_over_data(self, value: Tensor) -> Tensor:
        return value

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.trained

    def gradients(self) -> dict[str, Tensor]:
        found = {name: p.grad for name, p in self.parameters().items() if p.grad is not None}
        return self.sums | found

    def grad_norm(self) -> Tensor:
        return local_square_sum(list(self.gradients().values())).sqrt()

    def zero_grad(self) -> None:
        self.sums.clear()
        for parameter in self.model.parameters():
            parameter.grad = None

    def named_state(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Piece]:
        return pieces_of(self.slots, self.parameters() if tensors is None else tensors)

    def matrices(self) -> Matrices:
        return all_here(self.slots)

    def _add_in_float32(self) -> None:
        for name, parameter in self.parameters().items():
            if parameter.grad is None or parameter.grad.dtype == torch.float32:
                continue
            if name in self.sums:
                self.sums[name].add_(parameter.grad)
            else:
                self.sums[name] = parameter.grad.float()
            parameter.grad = None


def local_square_sum(gradients: list[Tensor]) -> Tensor:
    """Of all elements that this process has, float32; others add theirs before the root is taken."""
    if gradients[0].is_cuda:
        return square_sum([gradient.contiguous() for gradient in gradients])
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()
