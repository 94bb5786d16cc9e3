"""Any layout behind the one interface: which parts of the model this rank holds, and how the ranks work together.

    parallelize(spec, mesh)  ->  stages of this rank  ->  Spread, a `Parallel`

    tp, sp           the layers' own verbs (`tensor`)
    pp               the executor (`pipeline.run`)
    cp               the attend argument (`context`)
    ep               the expert layers (`expert`)
    dp, fsdp, zero   what becomes of gradients (`data`, `fsdp`, `zero`)

Each is written without the others; here they meet, and nowhere else. Gradients are those of one process with the whole
batch, whatever the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cairn.models.attend import Attend
from cairn.models.build import Build, Slot
from cairn.models.linear.maps import Vocabulary
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec
from cairn.models.weights import fill_random
from cairn.train.checkpoint.piece import Piece, whole
from cairn.train.fused_forward import FusedLayers
from cairn.train.parallel.balance import BalancedRouter
from cairn.train.parallel.collectives import all_reduce
from cairn.train.parallel.context import attend_for, local_batch
from cairn.train.parallel.data import Replicas, Sync
from cairn.train.parallel.expert import Sharing, SpreadExperts, is_expert_weight
from cairn.train.parallel.fsdp import Fsdp
from cairn.train.parallel.interface import Loss
from cairn.train.parallel.layout import IN_V, Options, Work, check, stages
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.pipeline.actions import Action, Placement, stage_of
from cairn.train.parallel.pipeline.deferred import Owed, deferring
from cairn.train.parallel.pipeline.run import Pipeline
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.transfers import with_messages
from cairn.train.parallel.rows import pieces_of_rows
from cairn.train.parallel.stage import ExpertMaker, Stage, share_of
from cairn.train.parallel.tensor import SequenceShards, TensorShards
from cairn.train.parallel.whole_matrices import Matrices, over_ranks
from cairn.train.parallel.zero import Zero
from cairn.train.recompute_kinds import Recompute

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

MakeAttend = Callable[["Batch"], Attend]
Fill = Callable[[Stage], None]  # gives a stage on the meta device its weights
TIED = "embedding.weight"


def parallelize(
    spec: ModelSpec,
    mesh: Mesh,
    options: Options = Options(),  # noqa: B008
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    fill: Fill | None = None,
    attend: MakeAttend | None = None,
    recompute: Recompute = "none",
    fused_context: int | None = None,
) -> "Spread":
    """This rank's part of a model. `fill`: weights from elsewhere than `seed`; `attend`: how tokens attend alone.

    `fused_context`: layers run through the fused form, whose rotations reach so far; None: one operation after another.
    """
    check(mesh.layout, mesh.layout.world(), spec, Work(options=options))
    build = Build("meta", dtype, _shards(mesh, options), fused=fused_context is not None)
    held = build_stages(spec, build, mesh, options)
    for stage in held:
        stage.recompute = recompute
        (fill or partial(_fill_random, device=mesh.device, seed=seed))(stage)
        if fused_context is not None:
            stage.fuse(FusedLayers(spec, mesh.device, fused_context, recompute=recompute))
    return Spread(spec, held, mesh, options, attend)


def build_stages(spec: ModelSpec, build: Build, mesh: Mesh, options: Options) -> list[Stage]:
    """The stages of this rank, on the meta device, one for each chunk."""
    count = stages(mesh.layout, options)
    placement: Placement = "v" if options.order in IN_V and count > 1 else "loop"
    make = _expert_maker(mesh, options)
    held: list[Stage] = []
    for chunk in range(count // mesh.size("pp")):
        number = stage_of(placement, mesh.size("pp"), mesh.rank("pp"), chunk)
        known = next((s.embedding for s in held if s.embedding is not None), None)
        held.append(Stage(spec, build, share_of(spec.layers, number, count), make, known))
    return held


def _expert_maker(mesh: Mesh, options: Options) -> ExpertMaker | None:
    if mesh.size("ep") == 1 and not options.balance_loss and not options.balance_bias:
        return None
    how = Sharing(mesh.group("ep"), mesh.group("cp"), options.balance_loss, options.balance_bias)
    return lambda build, spec, experts: SpreadExperts(build, spec, experts, how)


def _shards(mesh: Mesh, options: Options) -> Shards:
    if mesh.size("tp") == 1:
        return ALONE
    group = mesh.group("tp")
    return SequenceShards(group) if options.sequence_parallel else TensorShards(group)


def _fill_random(stage: Stage, device: str, seed: int) -> None:
    blank = {
        name for name, p in stage.named_parameters() if p.is_meta
    }  # a shared one has its values
    fill_random(stage, [s for s in stage.slots() if s.parameter in blank], device, seed)


class Spread:
    """A model over the ranks of a mesh."""

    def __init__(
        self,
        spec: ModelSpec,
        held: list[Stage],
        mesh: Mesh,
        options: Options,
        attend: MakeAttend | None = None,
    ) -> None:
        self.spec, self.stages, self.mesh, self.options, self.attend = (
            spec,
            held,
            mesh,
            options,
            attend,
        )
        self.data_rank, self.data_ranks = mesh.data_rank, mesh.data_ranks
        self.slots: list[Slot] = list({s.name: s for stage in held for s in stage.slots()}.values())
        self.whole = _whole_on_every_rank(self.slots)
        self.executed: list[Action] = []  # of the last step, where there is a pipeline
        self._pipelines: dict[int, Pipeline] = {}
        self.routers = {path: module for stage in held for path, module in stage.named_modules()
                        if isinstance(module, BalancedRouter)}  # fmt: skip
        self.syncs = _syncs(held, mesh, options)

    # -- one step -------------------------------------------------------------------------------

    def forward_backward(self, batches: "Sequence[Batch]", loss: Loss, valid: Tensor) -> Tensor:
        for sync in self.syncs:
            sync.begin()
        for router in self.routers.values():
            router.share = 1.0 / (len(batches) * self.data_ranks)
        work = _Work(self, batches, loss, valid)
        if self.mesh.size("pp") > 1:
            share, self.executed = self._pipeline(len(batches)).run(work)
        else:
            share = self._one_after_another(work)
        for sync in self.syncs:
            sync.finish()
        self._sum_what_is_shared()
        for router in self.routers.values():
            router.steer(self.mesh.group("replica"))
        return self._share_of_data_rank(share)

    def _one_after_another(self, work: "_Work") -> Tensor:
        total = torch.zeros((), device=work.valid.device)
        for number in range(len(work.batches)):
            out = work.forward(0, number, None, None)
            last = number + 1 == len(work.batches)
            for sync in self.syncs:
                sync.before_backward(last)
            out.backward()
            for sync in self.syncs:
                sync.after_backward()
            total += out.detach()
        return total

    def _pipeline(self, microbatches: int) -> Pipeline:
        if microbatches not in self._pipelines:
            chunks = self.options.chunks if self.options.order == "interleaved" else None
            plan = schedule(self.options.order, self.mesh.size("pp"), microbatches, chunks)
            rank = self.mesh.rank("pp")
            ops = with_messages(plan)[rank]
            peer = partial(self.mesh.peer, "pp")
            self._pipelines[microbatches] = Pipeline(plan, ops, rank, self.mesh.group("pp"), peer)
        return self._pipelines[microbatches]

    @torch.no_grad()
    def _sum_what_is_shared(self) -> None:
        """Gradients of which other ranks of tp or pp have another part."""
        gradients = self.gradients()
        if self.mesh.size("tp") > 1 and self.options.sequence_parallel:
            cut = [gradients[name] for name in sorted(self.whole & gradients.keys())]
            if cut:
                flat = torch.cat([gradient.flatten() for gradient in cut])
                dist.all_reduce(flat, group=self.mesh.group("tp"))
                for gradient, part in zip(cut, flat.split([g.numel() for g in cut]), strict=True):
                    gradient.copy_(part.view_as(gradient))
        if self._twice(TIED) and TIED in gradients:
            gradients[TIED].copy_(all_reduce(gradients[TIED], self.mesh.group("pp_ends")))

    def _share_of_data_rank(self, share: Tensor | None) -> Tensor:
        """The loss of this data rank's samples, on all its ranks."""
        total = torch.zeros((), device=self.mesh.device) if share is None else share.detach()
        total = all_reduce(total.float(), self.mesh.group("cp"))
        return all_reduce(total, self.mesh.group("pp"))

    # -- what the step and the checkpoint see ---------------------------------------------------

    def sum_over_data(self, value: Tensor) -> Tensor:
        return all_reduce(value, self.mesh.group("data"))

    def parameters(self) -> dict[str, nn.Parameter]:
        return {name: p for sync in self.syncs for name, p in sync.parameters().items()}

    def gradients(self) -> dict[str, Tensor]:
        return {name: g for sync in self.syncs for name, g in sync.gradients().items()}

    def grad_norm(self) -> Tensor:
        """Each rank counts what it has, divided by how many ranks have the same."""
        total = torch.zeros((), device=self.mesh.device)
        for sync in self.syncs:
            for name, gradient in sync.gradients().items():
                copies = sync.copies * (self.mesh.size("tp") if name in self.whole else 1)
                copies *= 2 if self._twice(name) else 1
                total += gradient.float().square().sum() / copies
        return all_reduce(total, self.mesh.everyone()).sqrt()

    def zero_grad(self) -> None:
        for sync in self.syncs:
            sync.zero_grad()

    def named_state(self, tensors: Mapping[str, Tensor] | None = None) -> dict[str, Piece]:
        rows = {name: span for sync in self.syncs for name, span in sync.rows.items()}
        if tensors is not None:
            return pieces_of_rows(self.slots, tensors, rows)
        biases = {f"{path}.bias": whole(r.bias_E) for path, r in self.routers.items() if r.rate}
        return pieces_of_rows(self.slots, self.parameters(), rows) | biases

    def matrices(self) -> Matrices:
        cut = self.mesh.size("fsdp") > 1
        rows = self.mesh.group("replica") if cut or self.options.zero else None
        mine = not cut or self.mesh.rank("dp") == 0  # copies of the same rows are not added
        apart = is_expert_weight if self.mesh.size("ep") > 1 else lambda name: False
        return over_ranks(self.slots, self.mesh.group("tp"), rows, mine, apart)

    def _twice(self, name: str) -> bool:
        """Whether the first and the last stage, on two ranks, both hold this parameter."""
        pp = self.mesh.size("pp")
        ends = self.mesh.rank("pp") in (0, pp - 1)
        return (
            name == TIED and self.spec.tied and pp > 1 and ends and self.options.order not in IN_V
        )


class _Work:
    """One step's microbatches, as the executor asks for them."""

    def __init__(
        self, spread: Spread, batches: "Sequence[Batch]", loss: Loss, valid: Tensor
    ) -> None:
        self.spread, self.batches, self.loss, self.valid = spread, batches, loss, valid
        group, kind = spread.mesh.group("cp"), spread.options.attention
        self.local = [local_batch(batch, group, kind) for batch in batches]
        self.attends = [attend_for(batch, group, kind, spread.attend) for batch in batches]

    def forward(
        self, chunk: int, microbatch: int, x_TD: Tensor | None, owed: Owed | None
    ) -> Tensor:
        batch = self.local[microbatch]
        stage = self.spread.stages[chunk]
        head = partial(self._head, batch) if stage.share.last else None
        x = batch.tokens_T if x_TD is None else x_TD
        with deferring(owed):
            return stage(x, batch.positions_T, self.attends[microbatch], head, owed)

    def _head(self, batch: "Batch", hidden_TD: Tensor, vocabulary: Vocabulary) -> Tensor:
        return self.loss(hidden_TD, vocabulary, batch, self.valid)

    def blank(self, microbatch: int) -> Tensor:
        tokens = self.local[microbatch].tokens_T
        cut = self.spread.mesh.size("tp") if self.spread.options.sequence_parallel else 1
        first = next(iter(self.spread.stages[0].layers.parameters()))
        return torch.empty(
            len(tokens) // cut, self.spread.spec.hidden, dtype=first.dtype, device=tokens.device
        )

    def before_backward(self, chunk: int, last: bool) -> None:
        for sync in self.spread.syncs:
            if isinstance(sync, Fsdp):
                sync.before_backward_of(self.spread.stages[chunk], last)

    def after_backward(self, chunk: int) -> None:
        for sync in self.spread.syncs:
            sync.after_backward()


def _whole_on_every_rank(slots: list[Slot]) -> set[str]:
    """Parameters that tensor parallelism does not cut."""
    cut = {slot.parameter for slot in slots if slot.cut is not None}
    return {slot.parameter for slot in slots} - cut


def _syncs(held: list[Stage], mesh: Mesh, options: Options) -> list[Sync]:
    """Who looks after which parameters: experts that are spread apart from all others."""
    parameters = {name: p for stage in held for name, p in stage.named_parameters()}
    experts = {n: p for n, p in parameters.items() if mesh.size("ep") > 1 and is_expert_weight(n)}
    dense = {n: p for n, p in parameters.items() if n not in experts}
    found: list[Sync] = []
    if mesh.size("fsdp") > 1:
        wide = torch.float32 if next(iter(parameters.values())).dtype != torch.float32 else None
        apart, whole_ones = set(experts.values()), options.whole_gradients
        found.append(Fsdp(held, mesh, apart, wide, options.reshard, whole_ones))
    elif options.zero and mesh.group("replica") is not None:
        found.append(Zero(dense, mesh.group("replica"), options.zero))
    else:
        found.append(Replicas(dense, mesh.group("replica")))
    if experts:
        found.append(Replicas(experts, mesh.group("expert_replica")))
    return found
