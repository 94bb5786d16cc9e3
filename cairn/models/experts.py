"""A mixture of experts: each token is sent to a few of many feed-forward layers.

    route -> sort by expert -> one grouped product for all experts -> back in the tokens' order -> weigh and sum

No shape depends on what was chosen and nothing waits for the device, so a CUDA graph can hold a step; padding rows are
routed like any other and read by nobody. Experts are split over tensor-parallel shards inside, like a dense
feed-forward; spreading whole experts over ranks is not this module's business. `models.fused_experts` computes the
same through our kernels.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.activation import Gate
from cairn.models.build import Build, Holder, Slot
from cairn.models.grouped_product import grouped_product, sort_by_expert
from cairn.models.layer_loop import Input, Step, Sublayer
from cairn.models.layers import FeedForward
from cairn.models.linear.form import Product
from cairn.models.shards import even_share
from cairn.models.spec import Experts, ModelSpec


class Router(Holder):
    """Which experts a token visits, and with which weights: `scores` of all, then `choose` among them.

    Training that balances its experts and serving share both; a bias steers the choice, never the weights.
    """

    def __init__(self, build: Build, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.experts, self.shards = experts, build.shards
        self.weight = build.parameter(experts.count, spec.hidden)
        # Added to the scores for choosing (DeepSeek, arXiv:2408.15664). float32, because its steps are small.
        self.bias_E: Tensor | None = None
        if experts.choice_bias:
            blank_E = torch.empty(experts.count, device=build.device)
            self.bias_E = nn.Parameter(blank_E, requires_grad=False)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of the chosen experts, each [T, per_token]."""
        weights_TN, chosen_TN = self.choose(self.scores(x_TD), self.bias_E)
        return weights_TN.to(x_TD.dtype), chosen_TN

    def scores(self, x_TD: Tensor) -> Tensor:
        """How well each expert fits each token, [T, E] float32."""
        # Every rank routes alike, but weighs only its slice of each expert: `whole` sums the gradient.
        scores_TE = F.linear(x_TD, self.shards.whole(self.weight)).float()
        return scores_TE.softmax(-1) if self.experts.gate == "softmax" else scores_TE.sigmoid()

    def choose(self, scores_TE: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best experts of each token, and their weights in float32."""
        biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.experts.groups > 1:
            biased_TE = self._in_best_groups(biased_TE)
        chosen_TN = biased_TE.topk(self.experts.per_token, dim=-1).indices
        return self.weigh(scores_TE, chosen_TN), chosen_TN

    def _in_best_groups(self, biased_TE: Tensor) -> Tensor:
        """-inf for experts outside of a token's best groups; a group is as good as its two best experts together."""
        biased_TGN = biased_TE.unflatten(-1, (self.experts.groups, -1))
        best = min(2, biased_TGN.shape[-1])
        sums_TG = biased_TGN.topk(best, dim=-1).values.sum(-1)
        kept_TG = torch.zeros_like(sums_TG, dtype=torch.bool)
        kept_TG.scatter_(1, sums_TG.topk(self.experts.top_groups, dim=-1).indices, True)
        return biased_TGN.masked_fill(~kept_TG[..., None], float("-inf")).flatten(-2)

    def weigh(self, scores_TE: Tensor, chosen_TN: Tensor) -> Tensor:
        """The weights of chosen experts."""
        weights_TN = scores_TE.gather(1, chosen_TN)
        if self.experts.renormalize:
            weights_TN = weights_TN / weights_TN.sum(dim=-1, keepdim=True)
        return weights_TN * self.experts.scale

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))
        if isinstance(self.bias_E, nn.Parameter):
            yield Slot("bias", "bias_E", tuple(self.bias_E.shape), init="zeros")


class ExpertLayer(Sublayer, Holder):
    """The feed-forward of a mixture: every token through a few of the experts, and through the shared one."""

    def __init__(self, build: Build, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.parts = ("gate", "up") if spec.gated else ("up",)
        self.experts, self.hidden, self.shards = experts, spec.hidden, build.shards
        self.width = even_share(experts.intermediate, build.shards, "columns of each expert")
        self.gate = Gate(spec.activation, spec.gated)
        self.router = Router(build, spec, experts)
        self.inner_EFD = build.parameter(experts.count, len(self.parts) * self.width, spec.hidden)
        self.down_EDF = build.parameter(experts.count, spec.hidden, self.width)
        shared = experts.shared_intermediate
        self.shared = FeedForward(build, spec, shared) if shared else None

    def forward(self, x_TD: Tensor) -> Tensor:
        entered_TD = self.shards.enter(x_TD)
        weights_TN, chosen_TN = self.router(entered_TD)
        order_M, ends_E = sort_by_expert(chosen_TN, self.experts.count)
        out_MD = self.visit(entered_TD[order_M // chosen_TN.shape[1]], ends_E)
        y_TD = self.shards.reduce(combined(out_MD, order_M, weights_TN))
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def plain(self, x_TD: Tensor, step: Step) -> Tensor:
        return self(x_TD)

    def fused(self, x: Input, step: Step) -> Product:
        return step.experts(self, x)

    def visit(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows that are sorted by expert, each through its expert, in one grouped product each way."""
        inner_MF = self.gate.plain(grouped_product(x_MD, self.inner_EFD, ends_E))
        return grouped_product(inner_MF, self.down_EDF, ends_E)

    def expert(self, expert: int, x_MD: Tensor) -> Tensor:
        """One expert for all rows: the definition of what the grouped form computes."""
        inner_MF = self.gate.plain(F.linear(x_MD, self.inner_EFD[expert]))
        return F.linear(inner_MF, self.down_EDF[expert])

    def slots(self) -> Iterator[Slot]:
        whole, first = self.experts.intermediate, self.width * self.shards.rank
        split = self.width != whole
        for expert in range(self.experts.count):
            for i, part in enumerate(self.parts):
                index = (expert, slice(i * self.width, (i + 1) * self.width))
                cut = (0, first, first + self.width) if split else None
                yield Slot(f"{expert}.{part}.weight", "inner_EFD", (whole, self.hidden), index, cut)
            cut = (1, first, first + self.width) if split else None
            yield Slot(f"{expert}.down.weight", "down_EDF", (self.hidden, whole), (expert,), cut)


def combined(out_MD: Tensor, order_M: Tensor, weights_TN: Tensor) -> Tensor:
    """Each token's results, weighed and summed in the order of its choices: the same sum in every run."""
    places_M = torch.empty_like(order_M)
    places_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    out_TND = out_MD[places_M].unflatten(0, weights_TN.shape)
    return (out_TND * weights_TN[..., None]).sum(1)
