"""The same model in fewer torch operations: the form that serves on a CPU.

    Transformer.forward     the form to read first; any device, with gradients
    Lean                    its weights as they are, float32 activations, without gradients, per layer:

        norm | q, k, v | rotate q and k together | store and attend | out | add | norm | gate, up | SwiGLU | down | add

On a CPU an operation costs microseconds before it computes anything, and a step of a small model is little else. So
q, k and v stay one tensor from the projection to the pages, a norm is four operations instead of seven, or three where
its weights go into the product behind it, sums are made in place, and angles are computed from frequencies that were
found once. The weights are taken in the form that they have when this is made: pack them before. What is written
otherwise (LayerNorm, learned positions, angles that depend on the length, other types) is served by the plain form;
`obstacle` says so.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from cairn.models.attend import Attend, Rule
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Attention, Columns, FeedForward, Norm, Rows
from cairn.models.packed_weights import Int4
from cairn.models.rope import frequencies
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer

Map = Callable[[Tensor], Tensor]


class Joined(Protocol):
    """An attend that takes q, k and v side by side."""

    def joined(self, qkv_TEC: Tensor, heads: int, rule: Rule) -> Tensor:
        """Store keys and values, and attend; [T, H * C]."""
        ...


def obstacle(model: Transformer) -> str | None:
    """Why this model has no lean form, or None."""
    spec, weight = model.spec, model.embedding.weight
    if weight.is_cuda or weight.dtype != torch.float32:
        return "it is not in float32 on a CPU"
    if model.build.shards.size > 1:
        return "it is shared between processes"
    if spec.norm != "rms":
        return "it norms by mean and variance"
    if spec.positions != "rope":
        return "its positions are learned"
    if any(spec.rope_of(layer).kind == "dynamic" for layer in range(spec.layers)):
        return "its rotation depends on how long a sequence is"
    return None


class LeanNorm:
    """x / sqrt(mean(x^2) + eps) * w, as x / hypot(|x|, sqrt(D eps)) * (sqrt(D) w)."""

    def __init__(self, norm: Norm, weight: Tensor | None = None) -> None:
        weight = (norm.weight if weight is None else weight).detach()
        width = weight.shape[-1]
        # None: whoever takes the result multiplies with it
        self.weight: Tensor | None = (weight + 1.0 if norm.plus_one else weight) * math.sqrt(width)
        self.floor = torch.tensor(math.sqrt(width * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = torch.div(x, length.hypot_(self.floor))
        return y if self.weight is None else y.mul_(self.weight)


class Angles(NamedTuple):
    """Of one kind of rotary positions: frequency, sign and amplitude of each column."""

    frequency_C: Tensor
    amplitude: float
    # [2, C / 2]: amplitude, negative in the lower half: what turns (low, high) into (-high, low)
    signed_2c: Tensor


class Turn(NamedTuple):
    """Cosines and signed sines of one step, [T, 1, 2, C / 2]: the lower and the upper half of a head's columns."""

    cos: Tensor
    sin: Tensor

    def rotate_(self, x_TH2c: Tensor) -> None:
        """In place; what `Rotation` computes."""
        exchanged_TH2c = x_TH2c.flip(2)  # (high, low)
        x_TH2c.mul_(self.cos).addcmul_(exchanged_TH2c, self.sin)


class Lean:
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.spec = model, model.spec
        kinds = {model.spec.rope_of(layer) for layer in range(model.spec.layers)}
        self.angles = {kind: _angles(kind, model.spec) for kind in kinds}
        self.layers = [LeanLayer(cast(Layer, layer), self.spec) for layer in model.layers]
        self.norm = LeanNorm(model.norm)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD = self.model.embed(tokens_T, positions_T)
        turns = dict(zip(self.angles, self.turns(positions_T), strict=True))
        for layer in self.layers:
            layer(x_TD, turns[layer.rope], cast(Joined, attend))
        return self.norm(x_TD)

    def turns(self, positions_T: Tensor) -> list[Turn]:
        """Of each kind of rotary positions that the layers have."""
        places_T11 = positions_T[:, None, None].float()
        return [_turn(angles, places_T11) for angles in self.angles.values()]


class LeanLayer:
    def __init__(self, layer: Layer, spec: ModelSpec) -> None:
        part = layer.attention
        self.rope = spec.rope_of(part.rule.layer)
        self.heads, self.turned_heads = spec.heads, spec.heads + spec.kv_heads
        self.all_heads, self.size = spec.heads + 2 * spec.kv_heads, spec.head_dim
        self.attention_norm, self.qkv = _behind(layer.attention_norm, part.qkv)
        self.out, self.rule = _product(part.out), part.rule
        self.head_norm = _head_norm(part, spec)
        self.attention_post_norm = _maybe(layer.attention_post_norm)
        self.feed_forward_norm, self.feed = _feed(layer.feed_forward_norm, layer.feed_forward)
        self.feed_forward_post_norm = _maybe(layer.feed_forward_post_norm)

    def __call__(self, x_TD: Tensor, turn: Turn, attend: Joined) -> None:
        """Adds this layer's results to x."""
        y_TD = self._attention(self.attention_norm(x_TD), turn, attend)
        x_TD.add_(y_TD if self.attention_post_norm is None else self.attention_post_norm(y_TD))
        y_TD = self.feed(self.feed_forward_norm(x_TD))
        x_TD.add_(
            y_TD if self.feed_forward_post_norm is None else self.feed_forward_post_norm(y_TD)
        )

    def _attention(self, y_TD: Tensor, turn: Turn, attend: Joined) -> Tensor:
        qkv_TF = self.qkv(y_TD)
        qkv_TEC = qkv_TF.view(-1, self.all_heads, self.size)
        if self.head_norm is not None:
            qk_TEC = qkv_TEC[:, : self.turned_heads]
            qk_TEC.copy_(self.head_norm(qk_TEC))
        turn.rotate_(qkv_TF.view(-1, self.all_heads, 2, self.size // 2)[:, : self.turned_heads])
        return self.out(attend.joined(qkv_TEC, self.heads, self.rule))


def _behind(norm: Norm, place: Columns) -> tuple[LeanNorm, Map]:
    """A norm and the product behind it; one in few bits takes the norm's weights in."""
    lean, packed = LeanNorm(norm), place.packed
    if not isinstance(packed, Int4) or place.joined_bias is not None or lean.weight is None:
        return lean, place.joined
    product = packed.after(lean.weight)
    lean.weight = None
    return lean, product


def _product(place: Rows) -> Map:
    return place.forward if place.packed is None or place.bias is not None else place.packed


def _feed(norm: Norm, part: FeedForward | ExpertLayer) -> tuple[LeanNorm, Map]:
    """A norm and the feed-forward behind it."""
    if isinstance(part, ExpertLayer):
        return LeanNorm(norm), part
    (lean, inner), act, down = _behind(norm, part.inner), part.act, _product(part.down)
    if len(part.inner.parts) == 1:
        return lean, lambda y_TD: down(act(inner(y_TD)))

    def gated(y_TD: Tensor) -> Tensor:
        gate_TF, up_TF = inner(y_TD).chunk(2, dim=-1)
        return down(act(gate_TF).mul_(up_TF))

    return lean, gated


def _head_norm(part: Attention, spec: ModelSpec) -> LeanNorm | None:
    """Of queries and keys at once: a row of weights for each head."""
    if part.q_norm is None or part.k_norm is None:
        return None
    rows = [part.q_norm.weight] * spec.heads + [part.k_norm.weight] * spec.kv_heads
    return LeanNorm(part.q_norm, torch.stack([row.detach() for row in rows]))


def _maybe(norm: Norm | None) -> LeanNorm | None:
    return None if norm is None else LeanNorm(norm)


def _angles(kind: Rope, spec: ModelSpec) -> Angles:
    frequency, amplitude = frequencies(kind, spec, torch.device("cpu"))
    sign = torch.ones_like(frequency)
    return Angles(
        torch.cat((frequency, frequency)), amplitude, torch.stack((-sign, sign)) * amplitude
    )


def _turn(angles: Angles, places_T11: Tensor) -> Turn:
    turned_T12c = (places_T11 * angles.frequency_C).unflatten(-1, (2, -1))
    cos_T12c = turned_T12c.cos()
    if angles.amplitude != 1.0:
        cos_T12c.mul_(angles.amplitude)
    return Turn(cos_T12c, turned_T12c.sin_().mul_(angles.signed_2c))
