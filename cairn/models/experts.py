"""A mixture of experts: each token is sent to a few of many feed-forward layers.

The plain form: a loop over experts, each applied to the tokens that chose it. It defines what the grouped
kernels have to compute. Experts are split over tensor-parallel shards inside, like a dense feed-forward;
spreading whole experts over ranks is not this module's business.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.models.layers import ACTIVATIONS, Build, FeedForward, Holder, Slot
from cairn.models.shards import even_share
from cairn.models.spec import Experts, ModelSpec


class Router(Holder):
    """Which experts a token visits, and with which weights."""

    def __init__(self, build: Build, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.experts, self.shards = experts, build.shards
        self.weight = build.parameter(experts.count, spec.hidden)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and indices of the chosen experts, each [T, per_token]."""
        # Every rank routes alike, but weighs only its slice of each expert: `whole` sums the gradient.
        scores_TE = F.linear(x_TD, self.shards.whole(self.weight)).float()
        if self.experts.gate == "softmax":
            scores_TE = scores_TE.softmax(dim=-1)
        else:
            scores_TE = scores_TE.sigmoid()
        weights_TN, chosen_TN = scores_TE.topk(self.experts.per_token, dim=-1)
        if self.experts.renormalize:
            weights_TN = weights_TN / weights_TN.sum(dim=-1, keepdim=True)
        return (weights_TN * self.experts.scale).to(x_TD.dtype), chosen_TN

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))


class ExpertLayer(Holder):
    def __init__(self, build: Build, spec: ModelSpec, experts: Experts) -> None:
        super().__init__()
        self.parts = ("gate", "up") if spec.gated else ("up",)
        self.experts, self.hidden, self.shards = experts, spec.hidden, build.shards
        self.width = even_share(experts.intermediate, build.shards, "columns of each expert")
        self.act = ACTIVATIONS[spec.activation]
        self.router = Router(build, spec, experts)
        self.inner_EFD = build.parameter(experts.count, len(self.parts) * self.width, spec.hidden)
        self.down_EDF = build.parameter(experts.count, spec.hidden, self.width)
        shared = experts.shared_intermediate
        self.shared = FeedForward(build, spec, shared) if shared else None

    def forward(self, x_TD: Tensor) -> Tensor:
        entered_TD = self.shards.enter(x_TD)
        weights_TN, chosen_TN = self.router(entered_TD)
        y_TD = torch.zeros_like(entered_TD)
        for expert in range(self.experts.count):
            rows_M, choice_M = (chosen_TN == expert).nonzero(as_tuple=True)
            if rows_M.numel():
                out_MD = self.expert(expert, entered_TD[rows_M])
                y_TD = y_TD.index_add(0, rows_M, out_MD * weights_TN[rows_M, choice_M, None])
        y_TD = self.shards.reduce(y_TD)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def expert(self, expert: int, x_MD: Tensor) -> Tensor:
        inner_MF = F.linear(x_MD, self.inner_EFD[expert])
        if len(self.parts) == 2:
            gate_MF, up_MF = inner_MF.chunk(2, dim=-1)
            inner_MF = self.act(gate_MF) * up_MF
        else:
            inner_MF = self.act(inner_MF)
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
