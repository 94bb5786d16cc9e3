"""Keeping experts equally busy: a router that counts, a loss that pushes, a bias that steers.

    loss    coefficient * E * sum over experts of (share of choices) * (mean score)      (Switch, arXiv:2101.03961)
            enters through its gradient alone; the loss that is reported stays the model's
    bias    added to the scores for choosing, never for weighing; after each step every expert that had too few tokens
            gets a little more, every one that had too many a little less                (DeepSeek, arXiv:2408.15664)

Counts are those of the whole microbatch for the loss and of the whole step for the bias, whatever ranks share it, so
neither depends on the layout.
"""

from typing import Any

import torch
from torch import Tensor

from cairn.models.build import ModelBuild
from cairn.models.experts import Router
from cairn.models.spec import Experts, ModelSpec
from cairn.train.parallel.collectives import all_reduce, size_of
from cairn.train.parallel.mesh import Group


class BalancedRouter(Router):
    """Router with load balancing; equal to the plain router if both `loss` and `rate` are 0."""

    def __init__(
        self,
        build: ModelBuild,
        spec: ModelSpec,
        experts: Experts,
        loss: float,
        rate: float,
        context: Group,
    ) -> None:
        """`context`: ranks that have other tokens of the same microbatch."""
        super().__init__(build, spec, experts)
        self.loss, self.rate, self.context = loss, rate, context
        # Of the step that a microbatch is, times the scale of the loss; the step hands it in.
        self.share: Tensor | float = 1.0
        # Not a buffer: code that places the weights must not touch it.
        self.load_E = torch.zeros(experts.count)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        scores_TE = self.scores(x_TD)
        if self.load_E.device != x_TD.device:
            self.load_E = self.load_E.to(x_TD.device)
        _, chosen_TN = self.choose(scores_TE, self.bias_E)
        if torch.is_grad_enabled():
            chosen_M = chosen_TN.flatten()
            # Not `bincount`: on a GPU the host would wait for it.
            counts_E = torch.zeros_like(self.load_E).index_add(
                0, chosen_M, self.load_E.new_ones(len(chosen_M))
            )
            self.load_E += counts_E
            scores_TE = self._pushed(scores_TE, counts_E)
        return self.weigh(scores_TE, chosen_TN).to(x_TD.dtype), chosen_TN

    def _pushed(self, scores_TE: Tensor, counts_E: Tensor) -> Tensor:
        if not self.loss:
            return scores_TE
        tokens = scores_TE.shape[0] * size_of(self.context)
        busy_E = all_reduce(counts_E, self.context) / (tokens * self.experts.per_token)
        # Ranks of tp compute the same scores, and their gradients are summed.
        weight = self.loss * self.experts.count * self.share / (tokens * self.shards.size)
        return _Push.apply(scores_TE, busy_E * weight)

    @torch.no_grad()
    def steer(self, replicas: Group, factor: Tensor | None = None) -> None:
        """Update the balancing bias after a step from the loads of all ranks; a NaN `factor` skips a vetoed step."""
        load_E = all_reduce(self.load_E, replicas)
        if self.rate and self.bias_E is not None:
            change_E = self.rate * torch.sign(load_E.mean() - load_E)
            if factor is not None:
                change_E = torch.where(factor.isfinite(), change_E, 0.0)
            self.bias_E += change_E
        self.load_E.zero_()


class _Push(torch.autograd.Function):
    """Scores unchanged; in backward each gets `weight` of its expert on top: the gradient of sum(weight * score)."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, weight_E: Tensor) -> Tensor:
        ctx.save_for_backward(weight_E)
        return scores_TE.view_as(scores_TE)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight_E,) = ctx.saved_tensors
        return gradients[0] + weight_E, None
