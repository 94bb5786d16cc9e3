"""Per-token outputs of passes without gradients: log probabilities, entropies, losses, hidden states.

    parallel.forward(batches, TargetLogProbs(spec))    ->    [{"logp": [T]}, ...]

For held-out losses, reference and teacher models, evaluation. Scores of all words never exist for more than a chunk of
tokens; on a GPU the log-probabilities come from the kernel that training uses. A head is a `TokenHead`: it gets the
hidden states of some tokens and the output projection, whole or this rank's shard.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.kernels.loss.linear_cross_entropy import linear_cross_entropy
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.parallel.collectives import all_reduce
from cairn.train.parallel.vocabulary import (
    IGNORED,
    entropies,
    kernel_operands,
    log_probs,
    scores_of,
    words_of,
)

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

CHUNK = 4096  # tokens whose scores exist at a time, in the plain form
Values = dict[str, Tensor]


class TargetLogProbs:
    """`logp`: of each token's target, 0 where it is IGNORED; `entropy`, if asked for: of what the model expects."""

    def __init__(
        self, spec: ModelSpec, entropy: bool = False, fused: bool = False, chunk: int = CHUNK
    ) -> None:
        self.softcap, self.entropy, self.chunk = spec.logit_softcap, entropy, chunk
        self.fused = fused and not self.softcap  # the kernel has no soft-cap

    def __call__(self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch") -> Values:
        values = {"logp": self._log_probs(hidden_TD, vocabulary, batch.targets_T)}
        if self.entropy:
            parts = hidden_TD.split(self.chunk)
            values["entropy"] = torch.cat([entropies(h, vocabulary, self.softcap) for h in parts])
        return values

    def _log_probs(self, hidden_TD: Tensor, vocabulary: Vocabulary, targets_T: Tensor) -> Tensor:
        operands = kernel_operands(hidden_TD, vocabulary) if self.fused else None
        if operands is not None:
            losses = linear_cross_entropy(
                operands.hidden_TD,
                operands.weight_VD,
                targets_T,
                shard=operands.shard,
                reduction="sum",
                ignore_index=IGNORED,
            )
            return -losses.loss_T
        parts = zip(hidden_TD.split(self.chunk), targets_T.split(self.chunk), strict=True)
        return torch.cat([log_probs(h, vocabulary, t, self.softcap).logp_T for h, t in parts])


class MostLikely:
    """`token`: what the model holds for the most likely next token, int64; of several the one with the smallest id."""

    def __init__(self, spec: ModelSpec) -> None:
        self.softcap = spec.logit_softcap

    def __call__(self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch") -> Values:
        scores_TV = scores_of(hidden_TD, vocabulary, self.softcap)
        words = words_of(vocabulary)
        here_T, at_T = scores_TV.max(-1)
        best_T = all_reduce(here_T, words.group, dist.ReduceOp.MAX)
        nowhere = torch.iinfo(torch.int64).max
        token_T = (at_T + words.first).where(here_T == best_T, nowhere)
        return {"token": all_reduce(token_T, words.group, dist.ReduceOp.MIN)}


class HiddenStates:
    """`hidden`: [T, D] after the last norm."""

    def __call__(self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch") -> Values:
        return {"hidden": hidden_TD}


def loss_by_stream(
    values: Sequence[Values], batches: "Sequence[Batch]", stream: str, count: int
) -> Tensor:
    """[count, 2] float64: summed negative log-probability and tokens of each of `count` streams, on this data rank.

    A batch says by `extra[stream]`, a number for each token, which stream it belongs to: a source of a blend, say.
    `Parallel.sum_over_data` adds the ranks.
    """
    totals = torch.zeros(count, 2, dtype=torch.float64, device=values[0]["logp"].device)
    for streams, batch in zip(values, batches, strict=True):
        counts_T = batch.targets_T != IGNORED
        both_T2 = torch.stack([-streams["logp"], torch.ones_like(streams["logp"])], dim=1).double()
        totals.index_add_(0, batch.extra[stream][counts_T].long(), both_T2[counts_T])
    return totals
