"""Training objectives: a loss for each token, computed from the log probability of its target.

    Rule(logp_T, streams) -> loss_T, slope_T          slope = d loss / d logp

    share = sum over this microbatch's valid tokens of (loss + z * lse^2) / valid tokens of the whole step

The divisor is global: whatever the microbatches, the padding and the ranks, the gradients that add up are those of one
large batch. A rule sees the streams that the batch carries beside its tokens (`Batch.extra`) and knows no logits. Two
forms that agree: the plain one asks torch, a chunk of tokens at a time, and computes each chunk's logits again in
backward; the fused one asks our kernel, which has the gradient ready when the loss is. Neither holds all logits, and
both work on a shard of the vocabulary.
"""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cairn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from cairn.kernels.loss.token_rule import applied, with_slope
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.parallel.pipeline.deferred import recompute_contexts
from cairn.train.parallel.vocabulary import KernelOperands, kernel_operands, log_probs

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

IGNORED = -100
CHUNK = 4096  # tokens whose logits exist at a time, in the plain form
Streams = Mapping[str, Tensor]


class Rule(Protocol):
    """A loss per token. What it returns for a token whose target is IGNORED does not count."""

    @property
    def z_loss(self) -> float:
        """Weight of lse^2 of each token that counts, which keeps logits from drifting."""
        ...

    @property
    def is_cross_entropy(self) -> bool:
        """Return whether the slope is -1 for every token; the kernel then needs one pass over the logits, not two."""
        ...

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        """Loss and slope of each token; no graph is recorded. `streams`: rows of `Batch.extra` for these tokens."""
        ...


class NextToken:
    """Cross entropy: how surprised is the model by the next token?"""

    is_cross_entropy = True

    def __init__(self, z_loss: float = 0.0) -> None:
        self.z_loss = z_loss

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        return -logp_T, torch.full_like(logp_T, -1.0)


def summed_in_chunks(
    sum_of: Callable[..., Tensor],
    streams_of: Callable[[slice], tuple[Any, ...]],
    hidden_TD: Tensor,
    vocabulary: Vocabulary,
    chunk: int,
) -> Tensor:
    """`sum_of` hidden states, output projection and the streams of each chunk of tokens, added.

    Several chunks are computed again in backward, and their gradients of a weight of 16 bits are added in float32.
    """
    if len(hidden_TD) <= chunk:
        return sum_of(hidden_TD, vocabulary, *streams_of(slice(0, chunk)))
    weight_VD = vocabulary.weight
    sums = weight_VD.requires_grad and weight_VD.dtype.itemsize < 4 and vocabulary.form is None
    sum_VD = _Float32Sum.apply(weight_VD) if sums else None

    def sum_of_chunk(hidden_CD: Tensor, *streams: Any) -> Tensor:
        head = vocabulary if sum_VD is None else _with_sum(vocabulary, sum_VD)
        return sum_of(hidden_CD, head, *streams)

    total = torch.zeros((), device=hidden_TD.device)
    for begin in range(0, len(hidden_TD), chunk):
        part = slice(begin, begin + chunk)
        total = total + checkpoint(
            sum_of_chunk,
            hidden_TD[part],
            *streams_of(part),
            use_reentrant=False,
            context_fn=recompute_contexts,
        )
    return total


class _Float32Sum(torch.autograd.Function):
    """Stands for a weight of 16 bits in the graph: autograd adds up in float32 what arrives here. Holds no numbers."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].to(ctx.dtype)


class _Weight(torch.autograd.Function):
    """The weight itself, whose gradient goes to the sum."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0].float(), None


def _with_sum(vocabulary: Vocabulary, sum_VD: Tensor) -> Vocabulary:
    """The same map. Made anew for each use: with fsdp the weight is gathered again for backward."""
    same = copy.copy(vocabulary)
    same._parameters = {}
    same.__dict__["weight"] = _Weight.apply(sum_VD, vocabulary.weight.detach())
    return same


class Objective:
    """A rule over all tokens of a microbatch: the `Loss` of a training step."""

    def __init__(
        self, spec: ModelSpec, rule: Rule | None = None, fused: bool = False, chunk: int = CHUNK
    ) -> None:
        self.rule: Rule = rule or NextToken()
        self.softcap, self.chunk = spec.logit_softcap, chunk
        self.fused = fused and not self.softcap  # the kernel has no soft-cap

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch", valid: Tensor
    ) -> Tensor:
        operands = kernel_operands(hidden_TD, vocabulary) if self.fused else None
        if operands is not None:
            return self._by_kernel(operands, batch, valid)

        def arguments(part: slice) -> tuple[Any, ...]:
            streams = {name: stream[part] for name, stream in batch.extra.items()}
            return batch.targets_T[part], streams

        return summed_in_chunks(self._sum, arguments, hidden_TD, vocabulary, self.chunk) / valid

    def _sum(
        self, hidden_CD: Tensor, vocabulary: Vocabulary, targets_C: Tensor, streams: Streams
    ) -> Tensor:
        z_loss = self.rule.z_loss
        logp_C, lse_C = log_probs(hidden_CD, vocabulary, targets_C, self.softcap, z_loss > 0)
        counts_C = targets_C != IGNORED
        loss_C, slope_C = applied(lambda x, _: self.rule(x, streams), logp_C, counts_C, slice(None))
        total = with_slope(logp_C, loss_C, slope_C).sum()
        return total if lse_C is None or not z_loss else total + z_loss * lse_C.square().sum()

    def _by_kernel(self, operands: KernelOperands, batch: "Batch", valid: Tensor) -> Tensor:
        """Divided on the way, so that gradients of 16 bits have the size that they will have in the end."""

        def rule(logp_C: Tensor, part: slice) -> tuple[Tensor, Tensor]:
            streams = {name: stream[part] for name, stream in batch.extra.items()}
            return self.rule(logp_C, streams)

        weights_T = valid.float().reciprocal().expand(len(batch.targets_T)).contiguous()
        return linear_cross_entropy(
            operands.hidden_TD,
            operands.weight_VD,
            batch.targets_T,
            shard=operands.shard,
            reduction="sum",
            weights_T=weights_T,
            ignore_index=IGNORED,
            z_loss=self.rule.z_loss,
            token_rule=None if self.rule.is_cross_entropy else rule,
        ).loss


def token_losses(
    logits_TV: Tensor, targets_T: Tensor, softcap: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Cross entropy of each token, float32; 0 where the target is IGNORED. The specification of every other form."""
    logits_TV = logits_TV.float() if logits_TV.dtype != torch.float64 else logits_TV
    if softcap:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    loss_T = F.cross_entropy(logits_TV, targets_T, reduction="none", ignore_index=IGNORED)
    if z_loss:
        squares_T = logits_TV.logsumexp(-1).square() * (targets_T != IGNORED)
        loss_T = loss_T + z_loss * squares_T
    return loss_T


def valid_tokens(targets: list[Tensor], device: torch.device | str) -> Tensor:
    """Number of tokens with a loss in these microbatches, counted on the device."""
    counts = [(targets_T != IGNORED).sum() for targets_T in targets]
    return torch.stack(counts).sum().float() if counts else torch.zeros((), device=device)
