"""Expert parallel: each rank some of the experts; tokens travel to theirs and back.

    route -> sort by expert -> all-to-all -> [rank's experts, one product for all] -> all-to-all -> weigh and add

Nothing is dropped: counts are exchanged first, so every rank receives exactly what was sent. The experts of a rank are
applied as one grouped product. With one rank it is the same without messages. The plain loop over experts in
`models.experts` is what this is held against.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from cairn.models.experts import ExpertLayer, Router
from cairn.models.layers import Build, Slot
from cairn.models.shards import even_share
from cairn.models.spec import Experts, ModelSpec
from cairn.train.parallel.balance import BalancedRouter
from cairn.train.parallel.collectives import all_to_all, size_of
from cairn.train.parallel.mesh import Group

EXPERT_WEIGHTS = ("inner_EFD", "down_EDF")


def is_expert_weight(name: str) -> bool:
    return name.rpartition(".")[2] in EXPERT_WEIGHTS


class Sharing(NamedTuple):
    """How the expert layers of a stage are shared and kept busy."""

    group: Group = None  # ranks that each hold some of the experts; None: all are here
    context: Group = None  # ranks that have other tokens of the same microbatch
    loss: float = 0.0  # see `balance`
    rate: float = 0.0


class SpreadExperts(ExpertLayer):
    """The experts of one rank among those of a group, behind a router that knows them all."""

    def __init__(self, build: Build, spec: ModelSpec, experts: Experts, how: Sharing) -> None:
        super().__init__(build._replace(device="meta"), spec, experts)
        self.group, self.ranks = how.group, size_of(how.group)
        self.place = 0 if how.group is None else dist.get_rank(how.group)
        self.router: Router = BalancedRouter(build, spec, experts, how.loss, how.rate, how.context)
        self.count = experts.count // self.ranks
        width = even_share(experts.intermediate, build.shards, "columns of each expert")
        self.inner_EFD = build.parameter(self.count, len(self.parts) * width, spec.hidden)
        self.down_EDF = build.parameter(self.count, spec.hidden, width)

    def forward(self, x_TD: Tensor) -> Tensor:
        entered_TD = self.shards.enter(x_TD)
        weights_TN, chosen_TN = self.router(entered_TD)
        flat_M = chosen_TN.flatten()
        order_M = flat_M.argsort(stable=True)  # by expert, so that each rank's rows lie together
        tokens_M = order_M // chosen_TN.shape[1]
        out_MD = self._visit(entered_TD[tokens_M], flat_M)
        weighed_MD = out_MD * weights_TN.flatten()[order_M, None]
        y_TD = torch.zeros_like(entered_TD).index_add(0, tokens_M, weighed_MD)
        y_TD = self.shards.reduce(y_TD)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def _visit(self, sorted_MD: Tensor, chosen_M: Tensor) -> Tensor:
        """Rows sorted by expert go to its rank, through it, and come back in the same order."""
        counts_E = torch.bincount(chosen_M, minlength=self.experts.count)
        arriving_RE = all_to_all(counts_E, self.group).view(self.ranks, self.count)
        sends = counts_E.view(self.ranks, self.count).sum(1).tolist()
        gets = arriving_RE.sum(1).tolist()
        here_MD = _AllToAll.apply(sorted_MD, sends, gets, self.group)
        # From each rank they come sorted by expert; all of an expert's rows have to lie together.
        experts_M = torch.arange(self.count, device=here_MD.device).repeat(self.ranks)
        order_M = experts_M.repeat_interleave(arriving_RE.flatten()).argsort(stable=True)
        out_MD = self._grouped(here_MD[order_M], arriving_RE.sum(0))
        back_MD = torch.empty_like(out_MD).index_copy(0, order_M, out_MD)
        return _AllToAll.apply(back_MD, gets, sends, self.group)

    def _grouped(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        """Rows of expert 0, then of expert 1, ...: each through its own weights, in one product each way."""
        ends_E = counts_E.cumsum(0).int()
        inner_MF = grouped_product(x_MD, self.inner_EFD, ends_E)
        if len(self.parts) == 2:
            gate_MF, up_MF = inner_MF.chunk(2, dim=-1)
            inner_MF = self.act(gate_MF) * up_MF
        else:
            inner_MF = self.act(inner_MF)
        return grouped_product(inner_MF, self.down_EDF, ends_E)

    def slots(self) -> Iterator[Slot]:
        """Those of this rank's experts, under their numbers in the whole model."""
        first = self.place * self.count
        for slot in super().slots():
            expert = int(slot.name.partition(".")[0])
            if first <= expert < first + self.count:
                yield slot._replace(index=(expert - first, *slot.index[1:]))


def grouped_product(x_MK: Tensor, weights_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Rows up to ends[0] times weights[0].T, from there up to ends[1] times weights[1].T, ..."""
    if x_MK.is_cuda and x_MK.dtype == torch.bfloat16:
        return F.grouped_mm(x_MK, weights_ENK.transpose(-1, -2), offs=ends_E)
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    parts = [F.linear(x, weights_ENK[e]) for e, x in enumerate(x_MK.split(sizes))]
    return torch.cat(parts)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], gets: list[int], group: Group) -> Tensor:
        ctx.sends, ctx.gets, ctx.group = sends, gets, group
        return all_to_all(x, group, sends, gets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_to_all(gradients[0], ctx.group, ctx.gets, ctx.sends), None, None, None
