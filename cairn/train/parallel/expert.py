"""Expert parallel: each rank some of the experts; tokens travel to theirs and back.

    route -> sort by expert -> all-to-all -> [rank's experts, one product for all] -> all-to-all -> weigh and add

Nothing is dropped: counts are exchanged first, so every rank receives exactly what was sent. The experts of a rank are
applied as one grouped product, by `models.experts`; with one rank it is the same without messages.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild, Slot
from cairn.models.experts import ExpertLayer, Router, combined
from cairn.models.grouped_product import sort_by_expert
from cairn.models.shards import even_share
from cairn.models.spec import Experts, ModelSpec
from cairn.train.parallel.balance import BalancedRouter
from cairn.train.parallel.collectives import all_to_all, size_of
from cairn.train.parallel.mesh import Group

EXPERT_WEIGHTS = ("inner_EFD", "down_EDF")


def is_expert_weight(name: str) -> bool:
    return name.rpartition(".")[2] in EXPERT_WEIGHTS


class Sharing(NamedTuple):
    """Expert parallelism and load balancing of a stage."""

    group: Group = None  # ranks that each hold some of the experts; None: all are here
    context: Group = None  # ranks that have other tokens of the same microbatch
    loss: float = 0.0  # see `balance`
    rate: float = 0.0


class SpreadExperts(ExpertLayer):
    """The experts of one rank among those of a group, behind a router that knows them all."""

    def __init__(self, build: ModelBuild, spec: ModelSpec, experts: Experts, how: Sharing) -> None:
        if experts.biases:
            raise ConfigError(
                f"the experts of a {spec.family} model have biases, and are neither spread nor balanced",
                hint="train it without expert parallelism and without balance",
            )
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
        order_M, ends_E = sort_by_expert(chosen_TN, self.experts.count)
        sorted_MD = entered_TD[order_M // chosen_TN.shape[1]]  # each rank's rows lie together
        y_TD = combined(self._visit_ranks(sorted_MD, ends_E), order_M, weights_TN)
        y_TD = self.shards.reduce(y_TD)
        return y_TD if self.shared is None else y_TD + self.shared(x_TD)

    def _visit_ranks(self, sorted_MD: Tensor, ends_E: Tensor) -> Tensor:
        """Rows sorted by expert go to its rank, through it, and come back in the same order."""
        if self.ranks == 1:
            return self.visit(sorted_MD, ends_E)
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        arriving_RE = all_to_all(counts_E, self.group).view(self.ranks, self.count)
        # The host waits for the device here, once: it has to know how many rows travel.
        both_2RE = torch.stack([counts_E.view_as(arriving_RE), arriving_RE])
        sends, gets = both_2RE.sum(2).tolist()
        here_MD = _AllToAll.apply(sorted_MD, sends, gets, self.group)
        # From each rank they come sorted by expert; all of an expert's rows have to lie together.
        experts_M = torch.arange(self.count, device=here_MD.device).repeat(self.ranks)
        spread_M = experts_M.repeat_interleave(arriving_RE.flatten(), output_size=sum(gets))
        order_M = spread_M.argsort(stable=True)
        out_MD = self.visit(here_MD[order_M], arriving_RE.sum(0).cumsum(0).int())
        back_MD = torch.empty_like(out_MD).index_copy(0, order_M, out_MD)
        return _AllToAll.apply(back_MD, gets, sends, self.group)

    def slots(self) -> Iterator[Slot]:
        """Slots of this rank's experts, named by their global index."""
        first = self.place * self.count
        for slot in super().slots():
            expert = int(slot.name.partition(".")[0])
            if first <= expert < first + self.count:
                yield slot._replace(index=(expert - first, *slot.index[1:]))


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: list[int], gets: list[int], group: Group) -> Tensor:
        ctx.sends, ctx.gets, ctx.group = sends, gets, group
        return all_to_all(x, group, sends, gets)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return all_to_all(gradients[0], ctx.group, ctx.gets, ctx.sends), None, None, None
