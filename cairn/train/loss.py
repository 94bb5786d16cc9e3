"""How surprised is the model by the next tokens? The one part, beside the data, in which kinds of training differ.

    share = sum over this microbatch's valid tokens of (cross entropy + z * lse^2) / valid tokens of the whole step

The divisor is global: whatever the microbatches, the padding and the ranks, the gradients that add up are those of one
large batch. Two forms that agree: `plain` asks torch, a chunk of tokens at a time, and computes each chunk's logits
again in backward; `fused` asks our kernel, which has the gradient ready when the loss is. Neither holds all logits.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cairn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.parallel.vocab_loss import sharded_token_losses

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

IGNORED = -100
CHUNK = 4096  # tokens whose logits exist at a time, in the plain form


class NextToken:
    """Cross entropy of the next token; a target of IGNORED has no loss."""

    def __init__(
        self, spec: ModelSpec, z_loss: float = 0.0, fused: bool = False, chunk: int = CHUNK
    ) -> None:
        self.softcap, self.z_loss, self.chunk = spec.logit_softcap, z_loss, chunk
        self.fused = fused and not self.softcap  # the kernel has no soft-cap

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch", valid: Tensor
    ) -> Tensor:
        if self.fused and vocabulary.shards.size == 1:
            return fused(hidden_TD, vocabulary.matrix(), batch.targets_T, valid, self.z_loss)
        total = torch.zeros((), device=hidden_TD.device)
        for begin in range(0, len(hidden_TD), self.chunk):
            part = slice(begin, begin + self.chunk)
            arguments = (hidden_TD[part], vocabulary, batch.targets_T[part])
            if len(hidden_TD) <= self.chunk:
                total = total + self._sum(*arguments)
            else:
                total = total + checkpoint(self._sum, *arguments, use_reentrant=False)
        return total / valid

    def _sum(self, hidden_CD: Tensor, vocabulary: Vocabulary, targets_C: Tensor) -> Tensor:
        if vocabulary.shards.size > 1:
            return sharded_token_losses(
                hidden_CD, vocabulary, targets_C, self.softcap, self.z_loss
            ).sum()
        return token_losses(
            vocabulary.logits(hidden_CD), targets_C, self.softcap, self.z_loss
        ).sum()


def token_losses(
    logits_TV: Tensor, targets_T: Tensor, softcap: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Of each token, float32; 0 where the target is IGNORED. The specification of every other form."""
    logits_TV = logits_TV.float() if logits_TV.dtype != torch.float64 else logits_TV
    if softcap:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    loss_T = F.cross_entropy(logits_TV, targets_T, reduction="none", ignore_index=IGNORED)
    if z_loss:
        squares_T = logits_TV.logsumexp(-1).square() * (targets_T != IGNORED)
        loss_T = loss_T + z_loss * squares_T
    return loss_T


def fused(
    hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, valid: Tensor, z_loss: float = 0.0
) -> Tensor:
    """Divided on the way, so that gradients of 16 bits have the size that they will have in the end."""
    weights_T = valid.float().reciprocal().expand(len(targets_T)).contiguous()
    return linear_cross_entropy(
        hidden_TD, weight_VD, targets_T, reduction="sum", weights_T=weights_T,
        ignore_index=IGNORED, z_loss=z_loss,
    ).loss  # fmt: skip


def valid_tokens(targets: list[Tensor]) -> Tensor:
    """How many tokens of these microbatches have a loss; counted on the device."""
    counts = [(targets_T != IGNORED).sum() for targets_T in targets]
    return torch.stack(counts).sum().float()
