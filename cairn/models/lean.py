"""The same model in fewer torch operations: the form that serves on a CPU.

    Transformer.forward     the form to read first; any device, with gradients
    Lean                    its weights as they are, float32 activations, without gradients, per layer:

        norm | q, k, v | rotate q and k together | store and attend | out | add | norm | gate, up | SwiGLU | down | add

On a CPU an operation costs microseconds before it computes anything, and a step of a small model is little else. So
q, k and v stay one tensor from the projection to the pages, a norm is four operations instead of seven, or three where
its weights go into the product behind it, sums are made in place, and angles are computed from frequencies that were
found once. Linear maps are taken in the form that they have when this is made; with packed blocks the norm, the gate
and the sum onto the residual are part of the product. What is written otherwise (LayerNorm, angles that depend on the
length) runs by torch while the rest stays lean.
"""

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from cairn.kernels.cpu.packed_product import NormWeight
from cairn.kernels.cpu.paged_decode import DecodeHeads
from cairn.models.activation import Gate
from cairn.models.attend import Attend, AttentionRule
from cairn.models.attention import Attention, joined_attentions
from cairn.models.experts import ExpertLayer
from cairn.models.layer_loop import Sublayer
from cairn.models.layers import Norm, ScaledOutput, Unnormed
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.form import PLAIN
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear
from cairn.models.rope import Rotation, axis_of_columns, frequencies
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer

Map = Callable[[Tensor], Tensor]


class JoinedAttend(Protocol):
    """An attend that takes q, k and v side by side."""

    def joined(self, qkv_TEC: Tensor, heads: int, rule: AttentionRule) -> Tensor:
        """Store keys and values, and attend; [T, H * C]."""
        ...


def obstacle(model: Transformer) -> str | None:
    """Why this model has no lean form, or None."""
    weight = model.embedding.weight
    if weight.is_cuda or weight.dtype != torch.float32:
        return "it is not in float32 on a CPU"
    if model.build.shards.size > 1:
        return "it is shared between processes"
    return None


class LeanNorm:
    """x / sqrt(mean(x^2) + eps) * w, as x / hypot(|x|, sqrt(D eps)) * (sqrt(D) w)."""

    def __init__(self, norm: Norm, weight: Tensor | None = None) -> None:
        weight = (norm.weight if weight is None else weight).detach()
        width = weight.shape[-1]
        # None: the caller multiplies the result with it
        self.weight: Tensor | None = (weight + 1.0 if norm.plus_one else weight) * math.sqrt(width)
        self.floor = torch.tensor(math.sqrt(width * norm.eps))

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        y = torch.div(x, length.hypot_(self.floor))
        return y if self.weight is None else y.mul_(self.weight)


class Frequencies(NamedTuple):
    """Frequency, sign and amplitude of each column of a RoPE."""

    frequency_C: Tensor
    amplitude: float | Tensor  # of all columns, or of each of C / 2
    # [2, C / 2]: amplitude, negative in the lower half: what rotates (low, high) into (-high, low)
    signed_2c: Tensor


class Angles(NamedTuple):
    """Cosines and signed sines of one step, [T, 1, 2, C / 2]: the lower and the upper half of a head's columns."""

    cos: Tensor
    sin: Tensor

    def rotate_(self, x_TH2c: Tensor) -> None:
        """Rotate in place; the result equals that of `Rotation`."""
        exchanged_TH2c = x_TH2c.flip(2)  # (high, low)
        x_TH2c.mul_(self.cos).addcmul_(exchanged_TH2c, self.sin)


class Lean:
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.spec = model, model.spec
        layers = [cast(Layer, layer) for layer in model.layers]
        self.norms: dict[Norm | Unnormed | ScaledOutput, Map] = {}
        self.products: dict[Linear, Map] = {}
        self.norm_of: dict[Linear, NormWeight] = {}  # of maps whose product begins with the norm
        for layer in layers:
            self._prepare(layer.attention_norm, layer.attention)
            self._prepare(layer.feed_forward_norm, layer.feed_forward)
            for norm in (layer.attention_post_norm, layer.feed_forward_post_norm):
                if norm is not None:
                    self.norms[norm] = _lean_norm(norm)
        self.norms[model.norm] = _lean_norm(model.norm)
        mixers = list(joined_attentions(model))
        self.head_norms = {mixer: _head_norm(mixer) for mixer in mixers}
        # Where products are compiled, so is attention.
        self.compiled = any(isinstance(part.form, BlocksForm) for part in self.products)
        heads = {mixer: decode_heads(mixer) for mixer in mixers if self.compiled}
        self.decode_heads = {mixer: head for mixer, head in heads.items() if head is not None}
        self.norms_behind = self._norms_behind(layers)
        self.all_fused = len(mixers) == len(layers)
        kinds = dict.fromkeys(mixer.rope for mixer in mixers)
        self.frequencies = {k: rope_frequencies(k, model.spec) for k in kinds if k is not None}

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        return self.tapped(tokens_T, positions_T, attend)[0]

    def tapped(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, taps: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The same, and the hidden states behind the layers in `taps`."""
        x_TD = self.model.embed(tokens_T, positions_T)
        rotations: dict[Rope, Rotation] = {}
        if not self.all_fused:
            rotations = self.model.rotations(positions_T, attend, x_TD.dtype)
        step = LeanStep(self, attend, self.angles(positions_T, attend), rotations)
        deep = self.model.deep_rows(tokens_T)
        return self.model.through(LeanResidual(x_TD, self), step, taps, deep)

    def angles(self, positions_T: Tensor, attend: Attend | None = None) -> dict[Rope, Angles]:
        """Angles of each RoPE of the layers; `attend` provides rows and columns of image tokens."""
        if not self.frequencies:
            return {}
        places_T11 = positions_T[:, None, None].float()
        axes_3T: Tensor | None = getattr(attend, "axes_3T", None)
        if axes_3T is None:
            return {
                kind: angles_at(rotation, places_T11) for kind, rotation in self.frequencies.items()
            }
        by_kind = {}
        for kind, rotation in self.frequencies.items():
            axis_C = axis_of_columns(kind, len(rotation.frequency_C))
            by_kind[kind] = angles_at(rotation, axes_3T[axis_C].t()[:, None].float())
        return by_kind

    def _norms_behind(self, layers: list[Layer]) -> dict[Norm | ScaledOutput, NormWeight]:
        """RMS norms of what is added to the residual, which are compiled with the sum."""
        norms = [n for x in layers for n in (x.attention_post_norm, x.feed_forward_post_norm)]
        return {
            norm: norm_weight(norm)
            for norm in norms
            if self.compiled and isinstance(norm, Norm) and norm.is_rms
        }

    def _prepare(self, norm: Norm | Unnormed, part: Sublayer) -> None:
        """A norm and the maps behind it; a form in few bits takes the norm's weights, or all of the norm, in."""
        for each in part.modules():
            if isinstance(each, Linear):
                self.products[each] = cast(Map, each.product)
        self.norms[norm] = lean = _lean_norm(norm)
        entry = part.entry
        if not isinstance(lean, LeanNorm) or lean.weight is None or entry is None:
            return
        assert isinstance(norm, Norm)  # it has a lean form
        if isinstance(entry.form, BlocksForm) and entry.addend is None:
            self.norms[norm] = _unchanged
            self.norm_of[entry] = norm_weight(norm)
            return
        if entry.form is None or entry.form_bias is not None or entry.addend is not None:
            return
        taken = entry.form.after(lean.weight)
        if taken is not None:
            lean.weight = None
            self.products[entry] = lambda x_TD: cast(Tensor, taken.product(x_TD, None, PLAIN))


class LeanStep:
    """A pass with few operations."""

    fuses = True

    def __init__(
        self,
        form: Lean,
        attend: Attend,
        angles: dict[Rope, Angles],
        rotations: dict[Rope, Rotation] | None = None,
    ) -> None:
        self.form, self.attend, self.angles = form, attend, angles
        self.rotations = rotations or {}

    def run(self, layer: Any, residual: Any) -> Any:
        return layer(residual, self)

    def rotation(self, rope: Rope | None) -> Rotation | None:
        return None if rope is None else self.rotations[rope]

    def columns(
        self,
        part: ColumnParallelLinear,
        x: "LeanInput",
        gate: Gate | None = None,
        then: RowParallelLinear | None = None,
    ) -> Tensor:
        norm = self.form.norm_of.get(part)
        if norm is not None:
            return cast(BlocksForm, part.form).fused(x.tensor, part.form_bias, gate, norm)
        y_TN = self.form.products[part](x.tensor)
        return y_TN if gate is None else gate.in_place(y_TN)

    def rows(self, part: RowParallelLinear, x: Tensor, onto: Tensor | None) -> Tensor | None:
        """Apply a linear map; None if the matmul added its result to the residual itself."""
        if onto is not None and isinstance(part.form, BlocksForm) and part.addend is None:
            part.form.fused(x, part.form_bias, onto_MN=onto)
            return None
        return self.form.products[part](x)

    def experts(self, part: ExpertLayer, x: "LeanInput") -> Tensor:
        return part.plain(x.tensor, self)

    def attended(self, mixer: Attention, qkv_TE: Tensor) -> Tensor:
        heads, placed = self.form.decode_heads.get(mixer), getattr(self.attend, "placed", None)
        if heads is not None and placed is not None:
            angles = None if mixer.rope is None else self.angles[mixer.rope]
            found_TN = placed(qkv_TE, heads, angles, mixer.plain_rule.layer)
            if found_TN is not None:
                return found_TN
        rotated, size = mixer.heads + mixer.kv_heads, mixer.head_dim
        every = rotated + mixer.kv_heads
        qkv_TEC = qkv_TE.view(-1, every, size)
        head_norm = self.form.head_norms[mixer]
        if head_norm is not None:
            qk_TEC = qkv_TEC[:, :rotated]
            qk_TEC.copy_(head_norm(qk_TEC))
        if mixer.rope is not None:
            qkv_TE2c = qkv_TE.view(-1, every, 2, size // 2)
            self.angles[mixer.rope].rotate_(qkv_TE2c[:, :rotated])
        return cast(JoinedAttend, self.attend).joined(qkv_TEC, mixer.heads, mixer.rule)


class LeanResidual(NamedTuple):
    """The residual, which every part is added to where it lies."""

    x_TD: Tensor
    form: Lean

    def normed(
        self, norm: Norm | Unnormed, post_norm: Norm | ScaledOutput | None = None
    ) -> "LeanInput":
        onto = self.x_TD if post_norm is None else None
        return LeanInput(self.form.norms[norm](self.x_TD), self, post_norm, onto)

    def plus(self, y_TD: Tensor) -> "LeanResidual":
        self.x_TD.add_(y_TD)
        return self

    def hidden(self) -> Tensor:
        return self.x_TD.clone()


class LeanInput(NamedTuple):
    tensor: Tensor
    residual: LeanResidual
    post_norm: Norm | ScaledOutput | None
    onto: Tensor | None = None

    def add(self, y_TD: Any) -> LeanResidual:
        if y_TD is None:
            return self.residual
        form = self.residual.form
        if isinstance(self.post_norm, Norm) and self.post_norm in form.norms_behind:
            form.norms_behind[self.post_norm].add_normed(y_TD, self.residual.x_TD)
            return self.residual
        if self.post_norm is not None:
            y_TD = form.norms[self.post_norm](y_TD)
        self.residual.x_TD.add_(y_TD)
        return self.residual


def _unchanged(x_TD: Tensor) -> Tensor:
    return x_TD


def _lean_norm(norm: Norm | Unnormed | ScaledOutput) -> Map:
    return LeanNorm(norm) if isinstance(norm, Norm) and norm.is_rms else norm


def _head_norm(mixer: Attention) -> LeanNorm | None:
    """Joint norm of queries and keys: a row of weights for each head."""
    norms = mixer.head_norms
    if norms is None:
        return None
    rows = [norms[0].weight] * mixer.heads + [norms[1].weight] * mixer.kv_heads
    return LeanNorm(norms[0], torch.stack([row.detach() for row in rows]))


def norm_weight(norm: Norm) -> NormWeight:
    weight = norm.weight.detach()
    return NormWeight(weight + 1.0 if norm.plus_one else weight, norm.eps)


def decode_heads(mixer: Attention) -> DecodeHeads | None:
    """Parameters of the compiled attention; None if it does not support this rule."""
    rule, norms, norm_EC = mixer.rule, mixer.head_norms, None
    if rule.by_scores:
        return None
    if norms is not None:
        q_C, k_C = (norm_weight(norm).weight_K for norm in norms)
        norm_EC = torch.stack([q_C] * mixer.heads + [k_C] * mixer.kv_heads)
    eps = 0.0 if norms is None else norms[0].eps
    return DecodeHeads(
        mixer.heads, mixer.kv_heads, mixer.head_dim, rule.scale, rule.window, norm_EC, eps
    )


def rope_frequencies(kind: Rope, spec: ModelSpec) -> Frequencies:
    frequency, amplitude = frequencies(kind, spec, torch.device("cpu"))
    sign = torch.ones_like(frequency)
    signed_2c = torch.stack((-sign, sign)) * amplitude
    return Frequencies(torch.cat((frequency, frequency)), amplitude, signed_2c)


def angles_at(frequencies: Frequencies, places_T1C: Tensor) -> Angles:
    """`places_T1C`: positions of each column, or one for all of them."""
    angle_T12c = (places_T1C * frequencies.frequency_C).unflatten(-1, (2, -1))
    cos_T12c = angle_T12c.cos()
    if isinstance(frequencies.amplitude, Tensor) or frequencies.amplitude != 1.0:
        cos_T12c.mul_(frequencies.amplitude)
    return Angles(cos_T12c, angle_T12c.sin_().mul_(frequencies.signed_2c))
