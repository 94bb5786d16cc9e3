"""A mixture of experts: each token is sent to a few of many feed-forward layers.

    route -> sort by expert -> one grouped product for all experts -> back in the tokens' order -> weigh and sum

No shape depends on what was chosen and nothing waits for the device, so a CUDA graph can hold a step; padding rows are
routed like any other and never read. Experts are split over tensor-parallel shards inside, like a dense
feed-forward; `expert_ranks` spreads whole experts over ranks. `models.fused_experts` computes the
same through our kernels.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from cairn.kernels.experts.matrices import ExpertMatrices, dequantized
from cairn.models.activation import Gate
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.cpu_half_precision import linear, matmul
from cairn.models.grouped_product import grouped_product, sort_by_expert
from cairn.models.layer_loop import ForwardStep, Input, Sublayer
from cairn.models.layers import FeedForward
from cairn.models.linear.form import Product
from cairn.models.linear.maps import ColumnParallelLinear
from cairn.models.shards import ALONE, even_share
from cairn.models.spec import Experts, ModelSpec


class Router(SlotModule):
    """Router: computes `scores` of all experts, then `choose` selects experts and weights for each token.

    Training that balances its experts and serving share both; a bias steers the choice, never the weights.
    """

    def __init__(self, build: ModelBuild, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.experts, self.shards = experts, build.shards
        self.weight = build.parameter(experts.count, spec.hidden)
        # Added to the scores for choosing (DeepSeek, arXiv:2408.15664). float32, because its steps are small.
        self.bias_E: Tensor | None = None
        if experts.choice_bias:
            blank_E = torch.empty(experts.count, device=build.device)
            self.bias_E = nn.Parameter(blank_E, requires_grad=False)
        self.logit_bias_E = build.parameter(experts.count) if experts.logit_bias else None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of the chosen experts, each [T, per_token]."""
        weights_TN, chosen_TN = self.choose(self.scores(x_TD), self.bias_E)
        return weights_TN.to(x_TD.dtype), chosen_TN

    def scores(self, x_TD: Tensor) -> Tensor:
        """Routing scores [T, E], float32."""
        # Every rank routes alike, but weighs only its slice of each expert: `whole` sums the gradient.
        bias_E = None if self.logit_bias_E is None else self.shards.whole(self.logit_bias_E)
        scores_TE = linear(x_TD, self.shards.whole(self.weight), bias_E).float()
        return scores_TE.softmax(-1) if self.experts.gate == "softmax" else scores_TE.sigmoid()

    def choose(self, scores_TE: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The best experts of each token, and their weights in float32."""
        biased_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if self.experts.groups > 1:
            biased_TE = self._in_best_groups(biased_TE)
        chosen_TN = biased_TE.topk(self.experts.per_token, dim=-1).indices
        return self.weigh(scores_TE, chosen_TN), chosen_TN

    def _in_best_groups(self, biased_TE: Tensor) -> Tensor:
        """Scores of the experts that a token may choose; the others are minus infinity.

        A group counts as its best expert, or where a bias steers the choice as the sum of its two best (DeepSeek-V3).
        """
        biased_TGI = biased_TE.unflatten(-1, (self.experts.groups, -1))
        best = min(2, biased_TGI.shape[-1]) if self.experts.choice_bias else 1
        groups_TG = biased_TGI.topk(best, dim=-1).values.sum(-1)
        chosen_TG = groups_TG.topk(self.experts.top_groups, dim=-1).indices
        outside_TG = torch.ones_like(groups_TG, dtype=torch.bool).scatter(1, chosen_TG, False)
        return biased_TGI.masked_fill(outside_TG[..., None], float("-inf")).flatten(1)

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
        if self.logit_bias_E is not None:
            yield Slot("logit_bias", "logit_bias_E", tuple(self.logit_bias_E.shape), init="zeros")


class SharedExpert(FeedForward):
    """The expert that every token visits; its result may be weighed by the sigmoid of a product (Qwen3-Next)."""

    def __init__(self, build: ModelBuild, spec: ModelSpec, experts: Experts) -> None:
        super().__init__(build, spec, experts.shared_intermediate)
        self.output_gate: ColumnParallelLinear | None = None
        if experts.shared_gate:
            self.output_gate = ColumnParallelLinear(
                build._replace(shards=ALONE), spec.hidden, {"gate": 1}, bias=False
            )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.weighed(super().forward(x_TD), x_TD)

    def weighed(self, y_TD: Tensor, x_TD: Tensor) -> Tensor:
        """The result for these inputs, weighed where there is a gate."""
        return y_TD if self.output_gate is None else y_TD * self.output_gate(x_TD)[0].sigmoid()


class ExpertLayer(Sublayer, SlotModule):
    """The feed-forward of a mixture: every token through a few of the experts, and through the shared one."""

    def __init__(self, build: ModelBuild, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.parts = ("gate", "up") if spec.gated else ("up",)
        self.experts, self.hidden, self.shards = experts, spec.hidden, build.shards
        self.width = even_share(experts.intermediate, build.shards, "columns of each expert")
        self.gate = Gate(spec.activation, spec.gated, spec.activation_limit)
        self.router = Router(build, spec, experts)
        self.inner_EFD = build.parameter(experts.count, len(self.parts) * self.width, spec.hidden)
        self.down_EDF = build.parameter(experts.count, spec.hidden, self.width)
        self.inner_bias_EF = self.down_bias_ED = None
        if experts.biases:
            self.inner_bias_EF = build.parameter(experts.count, len(self.parts) * self.width)
            self.down_bias_ED = build.parameter(experts.count, spec.hidden)
        self.forms: tuple[ExpertMatrices, ExpertMatrices] | None = None  # None: the parameters
        shared = experts.shared_intermediate
        self.shared = SharedExpert(build, spec, experts) if shared else None

    def forward(self, x_TD: Tensor) -> Tensor:
        entered_TD = self.shards.enter(x_TD)
        weights_TN, chosen_TN = self.router(entered_TD)
        order_M, ends_E = sort_by_expert(chosen_TN, self.experts.count)
        out_MD = self.visit(entered_TD[order_M // chosen_TN.shape[1]], ends_E)
        y_TD = combined(out_MD, order_M, weights_TN)
        if self.down_bias_ED is not None:
            y_TD = y_TD + self.weighed_bias(self.down_bias_ED, weights_TN, chosen_TN)
        y_TD = self.shards.reduce(y_TD)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        return self(x_TD)

    def fused(self, x: Input, step: ForwardStep) -> Product:
        return step.experts(self, x)

    def visit(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows that are sorted by expert, each through its expert, in one grouped product each way."""
        inner_EFD, down_EDF = self._floats(x_MD.dtype)
        inner_MF = grouped_product(x_MD, inner_EFD, ends_E)
        if self.inner_bias_EF is not None:
            row_M = torch.arange(len(x_MD), dtype=ends_E.dtype, device=ends_E.device)
            expert_M = torch.searchsorted(ends_E, row_M, right=True)
            inner_MF = inner_MF + self.inner_bias_EF[expert_M.clamp(max=self.experts.count - 1)]
        return grouped_product(self.gate.plain(inner_MF), down_EDF, ends_E)

    def matrices(self) -> tuple[ExpertMatrices, ExpertMatrices]:
        """Weights of both matmuls in the format of the kernels, without gradients."""
        return self.forms or (self.inner_EFD.data, self.down_EDF.data)

    def visits_here(self, weights_TN: Tensor, chosen_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and places of the experts that this rank holds; -1: another does."""
        return weights_TN, chosen_TN

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """Biases of both matmuls, without gradients."""
        inner, down = self.inner_bias_EF, self.down_bias_ED
        return None if inner is None else inner.data, None if down is None else down.data

    def take(self, forms: tuple[ExpertMatrices, ExpertMatrices], *, release: bool) -> None:
        """Multiply in these forms from now on. `release`: give back the memory of the parameters."""
        self.forms = forms
        if release:
            for name in ("inner_EFD", "down_EDF"):
                blank = torch.empty_like(getattr(self, name), device="meta")
                setattr(self, name, nn.Parameter(blank, requires_grad=False))

    def _floats(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.forms is None:
            return self.inner_EFD, self.down_EDF
        return dequantized(self.forms[0], dtype), dequantized(self.forms[1], dtype)

    def weighed_bias(self, bias_ED: Tensor, weights_TN: Tensor, chosen_TN: Tensor) -> Tensor:
        """This rank's part of the biases behind the second products, weighed as their results are."""
        dense_TE = weights_TN.new_zeros(len(weights_TN), self.experts.count)
        dense_TE = dense_TE.scatter(1, chosen_TN, weights_TN)
        return matmul(dense_TE, self.shards.whole(bias_ED)) / self.shards.size

    def expert(self, expert: int, x_MD: Tensor) -> Tensor:
        """Reference computation of one expert for all rows."""
        inner_bias_F = None if self.inner_bias_EF is None else self.inner_bias_EF[expert]
        inner_EFD, down_EDF = self._floats(x_MD.dtype)
        inner_MF = self.gate.plain(linear(x_MD, inner_EFD[expert], inner_bias_F))
        return linear(inner_MF, down_EDF[expert])

    def slots(self) -> Iterator[Slot]:
        yield from self.whole_slots()

    def whole_slots(self) -> Iterator[Slot]:
        """Slots of every expert."""
        whole, first = self.experts.intermediate, self.width * self.shards.rank
        split = self.width != whole
        for expert in range(self.experts.count):
            for i, part in enumerate(self.parts):
                index = (expert, slice(i * self.width, (i + 1) * self.width))
                cut = (0, first, first + self.width) if split else None
                yield Slot(f"{expert}.{part}.weight", "inner_EFD", (whole, self.hidden), index, cut)
                if self.inner_bias_EF is not None:
                    name = f"{expert}.{part}.bias"
                    yield Slot(name, "inner_bias_EF", (whole,), index, cut, "zeros")
            cut = (1, first, first + self.width) if split else None
            yield Slot(f"{expert}.down.weight", "down_EDF", (self.hidden, whole), (expert,), cut)
            if self.down_bias_ED is not None:
                name = f"{expert}.down.bias"
                yield Slot(name, "down_bias_ED", (self.hidden,), (expert,), init="zeros")


def combined(out_MD: Tensor, order_M: Tensor, weights_TN: Tensor) -> Tensor:
    """Each token's results, weighed and summed in the order of its choices: the same sum in every run."""
    places_M = torch.empty_like(order_M)
    places_M[order_M] = torch.arange(len(order_M), device=order_M.device)
    out_TND = out_MD[places_M].unflatten(0, weights_TN.shape)
    return (out_TND * weights_TN[..., None]).sum(1)
