"""A model over the ranks of a mesh: what a training step, a pass without gradients and a checkpoint ask of it.

    forward_backward   every microbatch through the stages, gradients summed over the ranks that share the weights
    forward            the same way without gradients: what a head makes of each token

Which stages this rank holds and who looks after their gradients was decided by `parallelize`. One process is a mesh of
one rank, and runs through the same lines without a message.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cairn.kernels.optim.grad_norm import square_sum
from cairn.models.build import Slot
from cairn.models.experts import Router
from cairn.models.linear.maps import Vocabulary
from cairn.models.spec import ModelSpec
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.parallel.balance import BalancedRouter
from cairn.train.parallel.collectives import all_reduce
from cairn.train.parallel.compute_time import ComputeTime
from cairn.train.parallel.data import Sync
from cairn.train.parallel.expert import is_expert_weight
from cairn.train.parallel.interface import Loss, TokenHead
from cairn.train.parallel.layout import IN_V, Strategy, stages
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.microbatches import BatchHead, MakeAttend, Microbatches
from cairn.train.parallel.outputs import Values, from_last_stage, in_batch_order
from cairn.train.parallel.pipeline.actions import Action, holder
from cairn.train.parallel.pipeline.run import Pipeline
from cairn.train.parallel.pipeline.schedules import forward_only, schedule
from cairn.train.parallel.pipeline.transfers import with_messages
from cairn.train.parallel.rows import pieces_of_rows
from cairn.train.parallel.stage import Stage
from cairn.train.parallel.whole_matrices import Matrices, over_ranks

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

TIED = "embedding.weight"


class ParallelModel:
    """This rank's part of a model, and the ranks that have the others."""

    def __init__(
        self,
        spec: ModelSpec,
        stages: list[Stage],
        syncs: list[Sync],
        mesh: Mesh,
        strategy: Strategy,
        attend: MakeAttend | None = None,
    ) -> None:
        self.spec, self.stages, self.syncs = spec, stages, syncs
        self.mesh, self.strategy, self.attend = mesh, strategy, attend
        self.data_rank, self.data_ranks = mesh.data_rank, mesh.data_ranks
        self.slots: list[Slot] = list(
            {s.name: s for stage in stages for s in stage.slots()}.values()
        )
        self.whole = _whole_on_every_rank(self.slots)
        named = (entry for stage in stages for entry in stage.named_parameters())
        self.trained = {name for name, parameter in named if parameter.requires_grad}
        self.executed: list[Action] = []  # of the last step, where there is a pipeline
        self._pipelines: dict[tuple[int, bool], Pipeline] = {}
        self.first_trained = first_trained(stages, mesh)
        modules = [entry for stage in stages for entry in stage.named_modules()]
        self.routers = {path: m for path, m in modules if isinstance(m, Router)}
        self.balanced = [m for m in self.routers.values() if isinstance(m, BalancedRouter)]
        self.compute_time = ComputeTime(mesh.device)

    # -- one pass -------------------------------------------------------------------------------

    def forward_backward(
        self, batches: "Sequence[Batch]", loss: Loss, valid: Tensor, scale: Tensor | float = 1.0
    ) -> Tensor:
        for sync in self.syncs:
            sync.begin(len(batches))
        for router in self.balanced:
            router.share = scale / (max(1, len(batches)) * self.data_ranks)
            router.load_E.zero_()

        def head(hidden_TD: Tensor, vocabulary: Vocabulary, batch: "Batch") -> Tensor:
            return loss(hidden_TD, vocabulary, batch, valid)

        work = self._microbatches(batches, head)
        if self.mesh.size("pp") > 1:
            outputs, self.executed = self._pipeline(len(work), trains=True).run(work)
            shares = list(outputs.values())
        else:
            shares = self._one_after_another(work)
        self.compute_time.end()
        for sync in self.syncs:
            sync.finish()
        self._sum_partial_gradients()
        return self._share_of_data_rank(shares)

    def steer_routers(self, factor: Tensor) -> None:
        for router in self.balanced:
            router.steer(self.mesh.group("replica"), factor)

    @torch.no_grad()
    def forward(self, batches: "Sequence[Batch]", head: TokenHead) -> list[Values]:
        for sync in self.syncs:
            sync.begin(0)
        work = self._microbatches(batches, head)
        pp, cp = self.mesh.size("pp"), self.mesh.group("cp")
        if pp > 1 and batches:
            by_number, _ = self._pipeline(len(work), trains=False).run(work)
        else:
            by_number = {number: work.forward(0, number, None, None) for number in range(len(work))}
        for sync in self.syncs:
            sync.after_forward()
        values = [
            in_batch_order(by_number[n], cp, self.strategy.attention) for n in sorted(by_number)
        ]
        count = stages(self.mesh.layout, self.strategy)
        placement = "v" if self.strategy.order in IN_V and count > 1 else "loop"
        last, _ = holder(placement, pp, count - 1)
        return from_last_stage(
            values, self.mesh.group("pp"), self.mesh.peer("pp", last), self.mesh.device
        )

    def _microbatches(self, batches: "Sequence[Batch]", head: BatchHead) -> Microbatches:
        return Microbatches(
            self.stages, self.syncs, self.mesh, self.strategy, self.attend, batches, head
        )

    def _one_after_another(self, work: Microbatches) -> list[Tensor]:
        shares = []
        for number in range(len(work)):
            share = work.forward(0, number, None, None)
            last = number + 1 == len(work)
            for sync in self.syncs:
                sync.before_backward(last)
            share.backward()
            for sync in self.syncs:
                sync.after_backward()
            shares.append(share.detach())
        return shares

    def _pipeline(self, microbatches: int, trains: bool) -> Pipeline:
        key = (microbatches, trains)
        if key not in self._pipelines:
            pp, rank, order = self.mesh.size("pp"), self.mesh.rank("pp"), self.strategy.order
            if trains:
                chunks = self.strategy.chunks if order == "interleaved" else None
                plan = schedule(order, pp, microbatches, chunks)
            else:
                placement = "v" if order in IN_V else "loop"
                plan = forward_only(pp, microbatches, len(self.stages), placement)
            first = self.first_trained if trains else 0
            ops, peer = with_messages(plan, first)[rank], partial(self.mesh.peer, "pp")
            self._pipelines[key] = Pipeline(plan, ops, rank, self.mesh.group("pp"), peer, first)
        return self._pipelines[key]

    @torch.no_grad()
    def _sum_partial_gradients(self) -> None:
        """Over ranks of tp or pp that have each computed a part of the same parameter's gradient."""
        gradients = self.gradients()
        if self.mesh.size("tp") > 1 and self.strategy.sequence_parallel:
            cut = [gradients[name] for name in sorted(self.whole & gradients.keys())]
            if cut:
                flat = torch.cat([gradient.flatten() for gradient in cut])
                dist.all_reduce(flat, group=self.mesh.group("tp"))
                for gradient, part in zip(cut, flat.split([g.numel() for g in cut]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        if self._is_on_both_ends(TIED) and TIED in gradients:
            gradients[TIED].copy_(all_reduce(gradients[TIED], self.mesh.group("pp_ends")))

    def _share_of_data_rank(self, shares: list[Tensor]) -> Tensor:
        """The loss of this data rank's samples, on all its ranks."""
        total = torch.zeros((), device=self.mesh.device)
        for share in shares:
            total += share
        total = all_reduce(total, self.mesh.group("cp"))
        return all_reduce(total, self.mesh.group("pp"))

    # -- what the step and the checkpoint see ---------------------------------------------------

    def sum_over_data(self, value: Tensor) -> Tensor:
        total = all_reduce(value, self.mesh.group("data"))
        self.compute_time.begin()  # the first one of a step: all ranks are together
        return total

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for sync in self.syncs for name, p in sync.parameters().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: g for sync in self.syncs for name, g in sync.gradients().items()}

    def grad_norm(self) -> Tensor:
        return self.norm_and_loss(torch.zeros((), device=self.mesh.device))[0]

    def norm_and_loss(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Each rank counts what it has, divided by how many ranks have the same; one reduction for both numbers."""
        alike: dict[tuple[int, torch.dtype], list[Tensor]] = {}
        for sync in self.syncs:
            for name, gradient in sync.gradients().items():
                copies = sync.copies * (self.mesh.size("tp") if name in self.whole else 1)
                copies *= 2 if self._is_on_both_ends(name) else 1
                alike.setdefault((copies, gradient.dtype), []).append(gradient)
        total: Tensor | None = None
        for (copies, _), pieces in alike.items():
            part = square_sum_of(pieces) if copies == 1 else square_sum_of(pieces) / copies
            total = part if total is None else total + part
        if total is None:  # nothing of this rank is trained
            total = torch.zeros((), device=self.mesh.device)
        everyone = self.mesh.everyone()
        if everyone is None:
            return total.sqrt(), loss
        # Zeros of all but the first rank: its loss comes out to the bit. What is not finite shows on any rank.
        if self.mesh.world_rank:
            loss = torch.where(loss.isfinite(), 0.0, loss)
        total, loss = all_reduce(torch.stack([total, loss]), everyone).unbind()
        return total.sqrt(), loss

    def zero_grad(self) -> None:
        for sync in self.syncs:
            sync.zero_grad()

    def named_state(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Piece]:
        rows = {name: span for sync in self.syncs for name, span in sync.rows.items()}
        if tensors is not None:
            return pieces_of_rows(self.slots, tensors, rows)
        biases = {
            f"{path}.bias": whole(router.bias_E.detach())
            for path, router in self.routers.items()
            if router.bias_E is not None
        }
        return pieces_of_rows(self.slots, self.parameters(), rows) | biases

    def matrices(self) -> Matrices:
        cut = self.mesh.size("fsdp") > 1
        rows = self.mesh.group("replica") if cut or self.strategy.zero else None
        mine = not cut or self.mesh.rank("dp") == 0  # copies of the same rows are not added
        apart = is_expert_weight if self.mesh.size("ep") > 1 else lambda name: False
        trained = [slot for slot in self.slots if slot.parameter in self.trained]
        return over_ranks(trained, self.mesh.group("tp"), rows, mine, apart)

    def _is_on_both_ends(self, name: str) -> bool:
        """Return whether the first and the last stage, on different ranks, both hold this parameter."""
        if name != TIED or not self.spec.tied or self.strategy.order in IN_V:
            return False
        pp = self.mesh.size("pp")
        return pp > 1 and self.mesh.rank("pp") in (0, pp - 1)


def first_trained(stages: Sequence[Stage], mesh: Mesh) -> int:
    """The first stage of the pipeline, on whichever rank, that has weights to train."""
    mine = [s.share.stage for s in stages if any(p.requires_grad for p in s.parameters())]
    first = torch.tensor(min(mine, default=stages[0].share.stages), device=mesh.device)
    return int(all_reduce(first, mesh.group("pp"), dist.ReduceOp.MIN))


def square_sum_of(gradients: Sequence[Tensor]) -> Tensor:
    """Sum of squares of all elements in float32; a single kernel on a GPU."""
    if gradients[0].is_cuda:
        return square_sum([gradient.contiguous() for gradient in gradients])
    return torch.stack([gradient.float().square().sum() for gradient in gradients]).sum()


def _whole_on_every_rank(slots: list[Slot]) -> set[str]:
    """Parameters that tensor parallelism does not cut."""
    cut = {slot.parameter for slot in slots if slot.cut is not None}
    return {slot.parameter for slot in slots} - cut
