"""A run of layers as a model of its own: what one rank, or one chunk of a rank, holds in a pipeline.

    stage 0          tokens -embed-> layers 0..5  -> x [T, D]
    stage 1                   x [T, D] -> layers 6..11 -norm-> hidden -head-> loss

Parameters have the names they have in the whole model, so checkpoints and initial weights do not depend on how the
layers are cut. A model that is not cut is a stage that is both first and last. The layers are those of
`models.transformer`; which tokens there are and how they attend is handed in.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cairn.models.attend import Attend
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Build, Holder, Norm, Slot, Vocabulary
from cairn.models.rope import Rotation, rotation
from cairn.models.shards import Shards
from cairn.models.spec import Experts, ModelSpec, Rope
from cairn.models.transformer import Layer, Positions
from cairn.train.fused_forward import FusedLayers
from cairn.train.parallel.pipeline.deferred import Owed, deferring
from cairn.train.parallel.tensor import GatherRows, SequenceShards, VocabularyShards
from cairn.train.recompute import KEPT
from cairn.train.recompute_kinds import Recompute

Head = Callable[
    [Tensor, Vocabulary], Tensor
]  # hidden states and output projection -> share of the loss
Context = AbstractContextManager[Any]
ExpertMaker = Callable[[Build, ModelSpec, Experts], ExpertLayer]


class Share(NamedTuple):
    """Which part of the model a stage is."""

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
        build: Build,
        share: Share,
        make_experts: ExpertMaker | None = None,
        embedding: Vocabulary | None = None,
    ) -> None:
        """`embedding`: one that this rank has already, which a tied head in another chunk shares."""
        super().__init__()
        self.spec, self.share = spec, share
        self.recompute: Recompute = "none"
        self.form: FusedLayers | None = None
        self.cut = build.shards if isinstance(build.shards, SequenceShards) else None
        ends = build._replace(shards=_for_vocabulary(build.shards))
        self.embedding = self.position_embedding = self.norm = self.head = None
        if share.first or (share.last and spec.tied):
            self.embedding = embedding or Vocabulary(ends, spec.vocab, spec.hidden)
        if share.first and spec.positions == "learned":
            self.position_embedding = Positions(build, spec.context, spec.hidden)
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
        owed: Owed | None = None,
    ) -> Tensor:
        """`x`: tokens [T] on the first stage, else [T, D]. With `head` the last stage returns what it makes.

        `owed`: where weight gradients go that are computed later, for a layer that is computed again.
        """
        if self.form is not None:
            x_TD = self._fused(self.form, x, positions_T, attend, owed)
        else:
            x_TD = self._plain(x, positions_T, attend, owed)
        if self.norm is None:
            return x_TD
        if self.cut is not None:
            x_TD = GatherRows.apply(x_TD, self.cut.group)
        return x_TD if head is None else head(x_TD, self.vocabulary())

    def fuse(self, form: FusedLayers) -> None:
        """Layers run through `form` from now on; it also says what they forget."""
        self.form = form
        form.adopt({int(number): cast(Layer, layer) for number, layer in self.layers.items()})

    def _plain(self, x: Tensor, positions_T: Tensor, attend: Attend, owed: Owed | None) -> Tensor:
        """Through the layers, and normed if these are the last."""
        x_TD = self.embed(x, positions_T) if self.share.first else x
        rotations = self.rotations(positions_T, attend, x_TD.dtype)
        for number, layer in self.layers.items():
            rotate = rotations.get(self.spec.rope_of(int(number)))
            if self.recompute == "none":
                x_TD = layer(x_TD, rotate, attend)
            else:
                x_TD = checkpoint(layer, x_TD, rotate, attend, **_forgetting(self.recompute, owed))
        return x_TD if self.norm is None else self.norm(x_TD)

    def _fused(
        self, form: FusedLayers, x: Tensor, positions_T: Tensor, attend: Attend, owed: Owed | None
    ) -> Tensor:
        """The same, by larger operations."""
        if self.embedding is not None and self.share.first:
            x = form.embed(self.embedding, x)
        y_TD, x_TD = form.through(self.layers.values(), x, positions_T, attend, owed)
        if self.norm is not None:
            return form.finish(y_TD, x_TD, self.norm)
        return x_TD if y_TD is None else x_TD + y_TD

    def vocabulary(self) -> Vocabulary:
        """The output projection of the last stage."""
        found = self.head if self.head is not None else self.embedding
        assert found is not None
        return found

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        assert self.embedding is not None
        x_TD = self.embedding(tokens_T)
        if self.spec.embedding_scale != 1.0:
            # Rounded to the weights' type first, as the reference rounds it.
            x_TD = x_TD * torch.tensor(self.spec.embedding_scale, dtype=x_TD.dtype).item()
        if self.position_embedding is not None:
            mine_T = positions_T if self.cut is None else self.cut.mine(positions_T)
            x_TD = x_TD + self.position_embedding(mine_T)
        return x_TD

    def rotations(
        self, positions_T: Tensor, attend: Attend, dtype: torch.dtype
    ) -> dict[Rope, Rotation]:
        if self.spec.positions != "rope":
            return {}
        kinds = {self.spec.rope_of(i) for i in self.share.layers}
        lengths_T = attend.lengths_T() if any(k.kind == "dynamic" for k in kinds) else None
        return {k: rotation(k, self.spec, positions_T, lengths_T, dtype) for k in kinds}

    def slots(self) -> Iterator[Slot]:
        """Every tensor this stage needs, by its name in the whole model."""
        for path, module in self.named_modules():
            if isinstance(module, Holder):
                yield from (slot.under(path) for slot in module.slots())

    def _replace_experts(self, make: ExpertMaker, build: Build) -> None:
        for number in self.share.layers:
            experts = self.spec.experts_of(number)
            if experts is not None:
                self.layers[str(number)].feed_forward = make(build, self.spec, experts)


def _forgetting(kind: Recompute, owed: Owed | None) -> dict[str, Any]:
    """Options of torch's checkpoint; the second time has to run as the first did, deferring included."""

    def contexts() -> tuple[Context, Context]:
        first: Context = nullcontext()
        second: Context = nullcontext()
        if kind != "full":
            first, second = create_selective_checkpoint_contexts(list(KEPT))
        return first, _both(second, deferring(owed))

    return {"use_reentrant": False, "preserve_rng_state": False, "context_fn": contexts}


@contextmanager
def _both(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield


def _for_vocabulary(shards: Shards) -> Shards:
    return VocabularyShards(shards.group) if isinstance(shards, SequenceShards) else shards
