"""The model: one decoder for training, prefill and decode.

    tokens [T] -embed-> x [T, D] -layers-> x -norm-> hidden [T, D] -logits-> [T, V]

    layer:  x + attention(norm(x));  x + feed_forward(norm(x))      `models.layer_loop`

Tokens are packed: there is no batch dimension and no padding. `positions_T` says where in its sequence each
token stands, `attend` which tokens belong together and where earlier keys are. The model knows neither.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from cairn.models.attend import Attend
from cairn.models.attention import Attention
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.expert_ranks import RankExperts, spreads_experts
from cairn.models.experts import ExpertLayer
from cairn.models.layer_loop import ForwardStep, PlainResidual, PlainStep, run_layer, run_layers
from cairn.models.layers import FeedForward, Norm, input_norm, output_norm
from cairn.models.linear.maps import Vocabulary
from cairn.models.mixer import make_mixer
from cairn.models.rope import Rotation, rotation
from cairn.models.spec import ModelSpec, Rope


class Layer(nn.Module):
    def __init__(self, build: ModelBuild, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        experts = spec.experts_of(layer)
        self.attention_norm = input_norm(build, spec)
        self.attention: Attention = make_mixer(spec.mixer_of(layer), build, spec, layer)
        self.attention_post_norm = output_norm(build, spec)
        self.feed_forward_norm = input_norm(build, spec)
        self.feed_forward: FeedForward | ExpertLayer
        if experts is None:
            self.feed_forward = FeedForward(build, spec, spec.intermediate)
        else:
            make = RankExperts if spreads_experts(build.shards) else ExpertLayer
            self.feed_forward = make(build, spec, experts)
        self.feed_forward_post_norm = output_norm(build, spec)

    def forward(self, residual: Any, step: ForwardStep) -> Any:
        return run_layer(self, residual, step)


class Transformer(nn.Module):
    """Built empty, by default on the meta device; `weights` fills it."""

    def __init__(self, spec: ModelSpec, build: ModelBuild = ModelBuild()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        self.spec = spec
        self.build = build
        # Embeddings that are given, where an engine has some, and beside them what deeper layers add.
        self.arena_RD: Tensor | None = None
        self.embedding = Vocabulary(build, spec.vocab, spec.hidden)
        self.position_embedding = (
            PositionEmbedding(build, spec.context, spec.hidden)
            if spec.positions == "learned"
            else None
        )
        self.layers = nn.ModuleList(Layer(build, spec, i) for i in range(spec.layers))
        self.norm = Norm(build, spec, spec.hidden)
        self.head = None if spec.tied else Vocabulary(build, spec.vocab, spec.hidden)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm, [T, D]; `logits` makes scores of those that are needed."""
        return self.tapped(tokens_T, positions_T, attend)[0]

    def tapped(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, taps: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The same, and the hidden states behind the layers in `taps`."""
        x_TD = self.embed(tokens_T, positions_T)
        step = PlainStep(attend, self.rotations(positions_T, attend, x_TD.dtype))
        return self.through(PlainResidual(x_TD), step, taps, self.deep_rows(tokens_T))

    def through(
        self,
        residual: Any,
        step: ForwardStep,
        taps: Collection[int] = (),
        deep: Sequence[Tensor] = (),
        most_layers: int | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers from the embedded tokens to the last norm, for any form of residual and step.

        `deep`: what is added to the residual behind the first layers, one after another. `most_layers`: the first so
        many alone, where their kernels are wanted and not their result.
        """
        layers = islice(enumerate(self.layers), most_layers)
        residual, tapped = run_layers(layers, residual, step, taps, deep)
        return ended(residual.normed(self.norm).tensor, self.spec), tapped

    def logits(self, hidden_TD: Tensor) -> Tensor:
        scores_TV = (self.head or self.embedding).logits(hidden_TD)
        cap = self.spec.logit_softcap
        return cap * torch.tanh(scores_TV / cap) if cap else scores_TV

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        if self.arena_RD is None:
            return self.placed(self.embedding(tokens_T), positions_T)
        given_T = tokens_T < 0  # -2 - r: row r of the arena, which is not scaled
        x_TD = scaled(self.embedding(tokens_T.clamp(min=0)), self.spec)
        rows_TD = self.arena_RD[(-2 - tokens_T).clamp(min=0), : self.spec.hidden]
        return self._with_positions(torch.where(given_T[:, None], rows_TD, x_TD), positions_T)

    def deep_rows(self, tokens_T: Tensor) -> Sequence[Tensor]:
        """DeepStack rows added after the first layers: zero for text tokens, empty without given embeddings."""
        if not self.spec.deep_rows or self.arena_RD is None:
            return ()
        given_T = tokens_T < 0
        if not given_T.is_cuda and not bool(given_T.any()):  # a GPU would have to be waited for
            return ()
        planes_TE = self.arena_RD[(-2 - tokens_T).clamp(min=0), self.spec.hidden :]
        return (planes_TE * given_T[:, None]).split(self.spec.hidden, dim=-1)

    def placed(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Looked-up rows as the first layer wants them: scaled, and with their positions where those are learned."""
        return self._with_positions(scaled(x_TD, self.spec), positions_T)

    def _with_positions(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        if self.position_embedding is None:
            return x_TD
        return x_TD + self.position_embedding(positions_T)

    def rotations(
        self, positions_T: Tensor, attend: Attend, dtype: torch.dtype
    ) -> dict[Rope, Rotation]:
        return rotations_of(self.spec, range(self.spec.layers), positions_T, attend, dtype)

    def slots(self) -> Iterator[Slot]:
        """Every tensor this model needs, by name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, SlotModule):
                yield from (slot.under(path) for slot in module.slots())


def scaled(x_TD: Tensor, spec: ModelSpec) -> Tensor:
    """Rounded to the weights' type first, as the reference rounds it."""
    if spec.embedding_scale == 1.0:
        return x_TD
    return x_TD * torch.tensor(spec.embedding_scale, dtype=x_TD.dtype).item()


def ended(hidden_TD: Tensor, spec: ModelSpec) -> Tensor:
    """Hidden states behind the last norm, divided as the logits of all of them are to be."""
    return hidden_TD if spec.logit_divisor == 1.0 else hidden_TD / spec.logit_divisor


def rotations_of(
    spec: ModelSpec, layers: range, positions_T: Tensor, attend: Attend, dtype: torch.dtype
) -> dict[Rope, Rotation]:
    """Rotation of each RoPE, shared by all layers with that RoPE."""
    kinds = spec.ropes(layers)
    lengths_T = attend.lengths_T() if any(k.kind == "dynamic" for k in kinds) else None
    axes_3T = getattr(attend, "axes_3T", None)  # of prompts with pictures
    return {k: rotation(k, spec, positions_T, lengths_T, dtype, axes_3T) for k in kinds}


class PositionEmbedding(SlotModule):
    """Learned absolute positions."""

    def __init__(self, build: ModelBuild, context: int, width: int) -> None:
        super().__init__()
        self.weight = build.parameter(context, width)

    def forward(self, positions_T: Tensor) -> Tensor:
        return nn.functional.embedding(positions_T, self.weight)

    def slots(self) -> Iterator[Slot]:
        yield Slot("weight", "weight", tuple(self.weight.shape))
