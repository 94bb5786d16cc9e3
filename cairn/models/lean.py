"""The same model in fewer torch operations: the form that serves on a CPU.

    Transformer.forward     the form to read first; any device, with gradients
    Lean                    its weights as they are, float32 activations, without gradients, per layer:

        norm | q, k, v | rotate q and k together | store and attend | out | add | norm | gate, up | SwiGLU | down | add

On a CPU an operation costs microseconds before it computes anything, and a step of a small model is little else. So
q, k and v stay one tensor from the projection to the pages, a norm is four operations instead of seven, sums are made
in place, and angles are computed from frequencies that were found once. What is written otherwise (LayerNorm, learned
positions, angles that depend on the length, other types) is served by the plain form; `obstacle` says so.
"""

import math
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from cairn.models.attend import Attend, Rule
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Attention, FeedForward, Norm
from cairn.models.rope import frequencies
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer


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
        self.weight = (weight + 1.0 if norm.plus_one else weight) * math.sqrt(width)
        self.floor = torch.tensor(math.sqrt(width * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.div(x, length.hypot_(self.floor)).mul_(self.weight)


class Angles(NamedTuple):
    """Of one kind of rotary positions: frequency, sign and amplitude of each column."""

    frequency_C: Tensor
    amplitude: float
    signed_C: (
        Tensor  # amplitude, negative in the lower half: what turns (low, high) into (-high, low)
    )


class Turn(NamedTuple):
    """Cosines and signed sines of one step, [T, 1, C]."""

    cos_T1C: Tensor
    sin_T1C: Tensor

    def rotate_(self, x_THC: Tensor) -> None:
        """In place; what `Rotation` computes."""
        exchanged = x_THC.roll(x_THC.shape[-1] // 2, -1)  # (high, low)
        x_THC.mul_(self.cos_T1C).addcmul_(exchanged, self.sin_T1C)


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
        places_T11 = positions_T[:, None, None].float()
        turns = {kind: _turn(angles, places_T11) for kind, angles in self.angles.items()}
        for layer in self.layers:
            layer(x_TD, turns[layer.rope], cast(Joined, attend))
        return self.norm(x_TD)


class LeanLayer:
    def __init__(self, layer: Layer, spec: ModelSpec) -> None:
        part = layer.attention
        self.rope = spec.rope_of(part.rule.layer)
        self.heads, self.turned_heads, self.size = (
            spec.heads,
            spec.heads + spec.kv_heads,
            spec.head_dim,
        )
        self.qkv, self.out, self.rule = part.qkv, part.out, part.rule
        self.head_norm = _head_norm(part, spec)
        self.attention_norm = LeanNorm(layer.attention_norm)
        self.attention_post_norm = _maybe(layer.attention_post_norm)
        self.feed_forward = layer.feed_forward
        self.feed_forward_norm = LeanNorm(layer.feed_forward_norm)
        self.feed_forward_post_norm = _maybe(layer.feed_forward_post_norm)

    def __call__(self, x_TD: Tensor, turn: Turn, attend: Joined) -> None:
        """Adds this layer's results to x."""
        y_TD = self._attention(self.attention_norm(x_TD), turn, attend)
        x_TD.add_(y_TD if self.attention_post_norm is None else self.attention_post_norm(y_TD))
        y_TD = _feed(self.feed_forward, self.feed_forward_norm(x_TD))
        x_TD.add_(
            y_TD if self.feed_forward_post_norm is None else self.feed_forward_post_norm(y_TD)
        )

    def _attention(self, y_TD: Tensor, turn: Turn, attend: Joined) -> Tensor:
        qkv_TEC = self.qkv.joined(y_TD).view(len(y_TD), -1, self.size)
        qk_TEC = qkv_TEC[:, : self.turned_heads]
        if self.head_norm is not None:
            qk_TEC.copy_(self.head_norm(qk_TEC))
        turn.rotate_(qk_TEC)
        return self.out.forward(attend.joined(qkv_TEC, self.heads, self.rule))


def _feed(part: FeedForward | ExpertLayer, y_TD: Tensor) -> Tensor:
    if isinstance(part, ExpertLayer):
        return part(y_TD)
    inner_TF = part.inner.joined(y_TD)
    if len(part.inner.parts) == 1:
        return part.down.forward(part.act(inner_TF))
    gate_TF, up_TF = inner_TF.chunk(2, dim=-1)
    return part.down.forward(part.act(gate_TF).mul_(up_TF))


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
        torch.cat((frequency, frequency)), amplitude, torch.cat((-sign, sign)) * amplitude
    )


def _turn(angles: Angles, places_T11: Tensor) -> Turn:
    turned_T1C = places_T11 * angles.frequency_C
    cos_T1C = turned_T1C.cos()
    if angles.amplitude != 1.0:
        cos_T1C.mul_(angles.amplitude)
    return Turn(cos_T1C, turned_T1C.sin_().mul_(angles.signed_C))
