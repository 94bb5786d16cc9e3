"""The text encoder: packed tokens in, a hidden state for each of them out.

    tokens [T] -embed-> x [T, D] -layers-> hidden [T, D]

Its attention and feed-forward are the decoder's own parts. `attend` says which tokens belong together; that they see
both sides is its business too. `types_T` tells the second text of a pair from the first.
"""

from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.kernels.cpu.encoder_layers import EncoderLayers
from cairn.models.attend import Attend
from cairn.models.attention import Attention
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.layer_loop import ForwardStep, PlainStep
from cairn.models.layers import FeedForward
from cairn.models.linear.maps import Vocabulary
from cairn.models.rope import Rotation
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import PositionEmbedding, Transformer, rotations_of


class EncoderModel(Protocol):
    """Whatever makes hidden states of whole texts."""

    def __call__(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, types_T: Tensor | None = None
    ) -> Tensor:
        """[T, D]."""
        ...


class LayerNorm(SlotModule):
    """Layer norm with an optional bias, which ModernBERT lacks."""

    def __init__(self, build: ModelBuild, width: int, eps: float, bias: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = build.parameter(width)
        self.bias = build.parameter(width) if bias else None

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.layer_norm(x_TD, self.weight.shape, self.weight, self.bias, self.eps)

    def slots(self) -> Iterator[Slot]:
        shape = tuple(self.weight.shape)
        yield Slot("weight", "weight", shape, init="ones")
        if self.bias is not None:
            yield Slot("bias", "bias", shape, init="zeros")


class EncoderLayer(nn.Module):
    def __init__(self, build: ModelBuild, spec: EncoderSpec, layer: int) -> None:
        super().__init__()
        shape = spec.shape
        self.is_post = spec.norms == "post"
        self.attention = Attention(build, shape, layer)
        self.attention_norm: LayerNorm | None = None
        if layer or spec.first_norm:
            self.attention_norm = _norm(build, spec)
        self.feed_forward = FeedForward(build, shape, shape.intermediate)
        self.feed_forward_norm = _norm(build, spec)
        self.fused_up: Callable[[Tensor], Tensor] | None = None  # see `cpu_form`

    def forward(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        if step.fuses:
            from cairn.models.encoder.gpu_form import fused_layer

            return fused_layer(self, x_TD, step)
        norm = self.attention_norm or nn.Identity()
        if self.is_post:
            x_TD = norm(x_TD + self.attention.plain(x_TD, step))
            return self.feed_forward_norm(x_TD + self._feed(x_TD))
        x_TD = x_TD + self.attention.plain(norm(x_TD), step)
        return x_TD + self._feed(self.feed_forward_norm(x_TD))

    def _feed(self, x_TD: Tensor) -> Tensor:
        if self.fused_up is None:
            return self.feed_forward(x_TD)
        return self.feed_forward.down(self.fused_up(x_TD))


class Encoder(nn.Module):
    """Built empty, on the meta device; `load` fills it."""

    def __init__(self, spec: EncoderSpec, build: ModelBuild = ModelBuild()) -> None:  # noqa: B008 (immutable)
        super().__init__()
        self.spec, self.build = spec, build
        shape = spec.shape
        self.embedding = Vocabulary(build, shape.vocab, shape.hidden)
        self.position_embedding: PositionEmbedding | None = None
        if shape.positions == "learned":
            self.position_embedding = PositionEmbedding(build, spec.position_rows, shape.hidden)
        self.type_embedding: PositionEmbedding | None = None
        if spec.token_types:
            self.type_embedding = PositionEmbedding(build, spec.token_types, shape.hidden)
        self.embedding_norm = _norm(build, spec)
        self.layers = nn.ModuleList(EncoderLayer(build, spec, at) for at in range(shape.layers))
        self.norm = _norm(build, spec) if spec.norms == "pre" else None
        self.compiled: EncoderLayers | None = None  # all layers at once: see `cpu_form`

    @property
    def forms(self) -> list[EncoderLayers]:
        """Weights that are stored outside of the parameters."""
        return [] if self.compiled is None else [self.compiled]

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, types_T: Tensor | None = None
    ) -> Tensor:
        shape = self.spec.shape
        x_TD = self._embed(tokens_T, positions_T, types_T)
        if self.compiled is not None:
            return self.compiled(x_TD, cast(Bidirectional, attend).lengths)
        rotations = rotations_of(shape, range(shape.layers), positions_T, attend, x_TD.dtype)
        step = packed_step(x_TD, attend, shape, rotations)
        for layer in self.layers:
            x_TD = layer(x_TD, step)
        return x_TD if self.norm is None else self.norm(x_TD)

    def _embed(self, tokens_T: Tensor, positions_T: Tensor, types_T: Tensor | None) -> Tensor:
        x_TD = self.embedding(tokens_T)
        if self.type_embedding is not None:
            rows = self.type_embedding.weight
            x_TD = x_TD + (rows[0] if types_T is None else self.type_embedding(types_T))
        if self.position_embedding is not None:
            x_TD = x_TD + self.position_embedding(positions_T + self.spec.position_offset)
        return self.embedding_norm(x_TD)

    def slots(self) -> Iterator[Slot]:
        """Every tensor this model needs, by name, and where it goes."""
        for path, module in self.named_modules():
            if isinstance(module, SlotModule):
                yield from (slot.under(path) for slot in module.slots())


def packed_step(
    x_TD: Tensor, attend: Attend, shape: ModelSpec, rotations: dict[Rope, Rotation]
) -> ForwardStep:
    """Step with fused kernels if they are available and no gradients are needed, else with torch."""
    if not x_TD.is_cuda or x_TD.dtype == torch.float32 or torch.is_grad_enabled():
        return PlainStep(attend, rotations)
    from cairn.models.encoder.gpu_form import PackedStep

    return PackedStep(attend, shape, rotations)


class BidirectionalDecoder(nn.Module):
    """A decoder's layers as an encoder: only who sees whom differs, and that is in `attend`."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model
        self.shape: ModelSpec = model.spec

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, types_T: Tensor | None = None
    ) -> Tensor:
        return self.model(tokens_T, positions_T, attend)


def _norm(build: ModelBuild, spec: EncoderSpec) -> LayerNorm:
    return LayerNorm(build, spec.shape.hidden, spec.shape.norm_eps, spec.norm_bias)
