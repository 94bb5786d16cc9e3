"""A run of layers as a model of its own: what one rank, or one chunk of a rank, holds in a pipeline.

    stage 0          tokens -embed-> layers 0..5  -> x [T, D]
    stage 1                   x [T, D] -> layers 6..11 -norm-> hidden -head-> loss

Parameters have the names they have in the whole model, so checkpoints and initial weights do not depend on how the
layers are cut. A model that is not cut is a stage that is both first and last. The layers are those of
`models.transformer`; which tokens there are and how they attend is handed in.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from cairn.models.attend import Attend
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.experts import ExpertLayer
from cairn.models.layer_loop import ForwardStep, PlainResidual, Residual, run_layers
from cairn.models.layers import Norm
from cairn.models.linear.maps import Vocabulary
from cairn.models.rope import Rotation
from cairn.models.shards import Shards
from cairn.models.spec import Experts, ModelSpec, Rope
from cairn.models.transformer import Layer, PositionEmbedding, ended, rotations_of, scaled
from cairn.train.fused_forward import FusedLayers, TrainingResidual, TrainingStep
from cairn.train.offload import Offload
from cairn.train.parallel.pipeline.deferred import Deferred
from cairn.train.parallel.tensor import GatherRows, SequenceShards, VocabularyShards
from cairn.train.recompute import RecomputingStep
from cairn.train.recompute_kinds import Recompute

# Hidden states and output projection -> share of the loss.
Head = Callable[[Tensor, Vocabulary], Tensor]
ExpertMaker = Callable[[ModelBuild, ModelSpec, Experts], ExpertLayer]


class Share(NamedTuple):
    """Part of the model in a pipeline stage."""

    stage: int
    stages: int
    layers: range

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1


def share_of(layers: int, stage: int, stages: int) -> Share:
    """Layers in order, as evenly as they divide; the ends, which have more to do, are the last to get one more."""
    each, extra = divmod(layers, stages)
    order = sorted(range(stages), key=lambda s: ((s == 0) + 2 * (s == stages - 1), s))
    sizes = [each + (s in order[:extra]) for s in range(stages)]
    begin = sum(sizes[:stage])
    return Share(stage, stages, range(begin, begin + sizes[stage]))


class Stage(nn.Module):
    """Built empty, on the meta device unless `build` says otherwise."""

    def __init__(
        self,
        spec: ModelSpec,
        build: ModelBuild,
        share: Share,
        make_experts: ExpertMaker | None = None,
        embedding: Vocabulary | None = None,
    ) -> None:
        """`embedding`: one that this rank has already, which a tied head in another chunk shares."""
        super().__init__()
        self.spec, self.share = spec, share
        self.recompute: Recompute = "none"
        self.form: FusedLayers | None = None
        self.offload: Offload | None = None
        self.cut = build.shards if isinstance(build.shards, SequenceShards) else None
        ends = build._replace(shards=_for_vocabulary(build.shards))
        self.embedding = self.position_embedding = self.norm = self.head = None
        if share.first or (share.last and spec.tied):
            self.embedding = embedding or Vocabulary(ends, spec.vocab, spec.hidden)
        if share.first and spec.positions == "learned":
            self.position_embedding = PositionEmbedding(build, spec.context, spec.hidden)
        self.layers = nn.ModuleDict({str(i): Layer(build, spec, i) for i in share.layers})
        if share.last:
            self.norm = Norm(build, spec, spec.hidden)
            self.head = None if spec.tied else Vocabulary(ends, spec.vocab, spec.hidden)
        if make_experts is not None:
            self._replace_experts(make_experts, build)

    def forward(
        self,
        x: Tensor,
        positions_T: Tensor,
        attend: Attend,
        head: Head | None = None,
        deferred: Deferred | None = None,
    ) -> Tensor:
        """`x`: tokens [T] on the first stage, else [T, D]. With `head` the last stage returns what it makes.

        `deferred`: where weight gradients go that are computed later, for a layer that is computed again.
        """
        x_TD = self.embed(x, positions_T) if self.share.first else x
        residual, step = self._begin(x_TD, positions_T, attend, deferred)
        numbered = ((int(number), layer) for number, layer in self.layers.items())
        residual, _ = run_layers(numbered, residual, step)
        if self.norm is None:
            return residual.hidden()
        x_TD = ended(residual.normed(self.norm).tensor, self.spec)
        del residual  # beside the logits, what the last layer has added would be a [T, D] too many
        if self.cut is not None:
            x_TD = GatherRows.apply(x_TD, self.cut.group)
        return x_TD if head is None else head(x_TD, self.vocabulary())

    def fuse(self, form: FusedLayers) -> None:
        """Layers run through larger operations from now on; `form` also says what they forget."""
        self.form = form

    def _begin(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, deferred: Deferred | None
    ) -> tuple[Residual, ForwardStep]:
        """The residual and the step of the form that this stage runs in."""
        form = self.form
        rotations: dict[Rope, Rotation] = {}
        if form is None or form.rotates_by_torch:
            rotations = rotations_of(self.spec, self.share.layers, positions_T, attend, x_TD.dtype)
        if self.offload is not None:
            self.offload.begin()
        if form is not None:
            step = TrainingStep(form, positions_T, attend, rotations, deferred, self.offload)
            return TrainingResidual(x_TD), step
        plain = RecomputingStep(attend, rotations, self.recompute, deferred, self.offload)
        return PlainResidual(x_TD), plain

    def vocabulary(self) -> Vocabulary:
        """The output projection of the last stage."""
        module = self.head if self.head is not None else self.embedding
        assert module is not None
        return module

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        assert self.embedding is not None
        lookup = self.embedding if self.form is None else partial(self.form.lookup, self.embedding)
        x_TD = scaled(lookup(tokens_T), self.spec)
        if self.position_embedding is not None:
            mine_T = positions_T if self.cut is None else self.cut.mine(positions_T)
            x_TD = x_TD + self.position_embedding(mine_T)
        return x_TD

    def slots(self) -> Iterator[Slot]:
        """Every tensor this stage needs, by its name in the whole model."""
        for path, module in self.named_modules():
            if isinstance(module, SlotModule):
                yield from (slot.under(path) for slot in module.slots())

    def _replace_experts(self, make: ExpertMaker, build: ModelBuild) -> None:
        for number in self.share.layers:
            experts = self.spec.experts_of(number)
            if experts is not None:
                self.layers[str(number)].feed_forward = make(build, self.spec, experts)


def _for_vocabulary(shards: Shards) -> Shards:
    return VocabularyShards(shards.group) if isinstance(shards, SequenceShards) else shards
