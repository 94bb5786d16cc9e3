"""The same model through fewer and larger kernels: the form that serves on a GPU.

    Transformer.forward     one torch operation after another; any device, with gradients; the form to read first
    Fused                   its weights as they are, without gradients, per layer:

        add + norm | q, k, v | norm, rotate, write to the pages | attend | out | add + norm | gate, up, SwiGLU | down

What a part adds waits in the residual and is added by the norm that follows. Products choose their kernels themselves
(`models.linear`). A part that our kernels cannot express (angles that depend on the length, a relu gate, separate
projections) runs by torch while the others stay fused. The two forms agree up to the rounding of bfloat16.
"""

import copy
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from cairn.kernels.experts.combine import combine
from cairn.kernels.experts.combine_norm import (
    Choices,
    combine_add_rmsnorm,
    combine_add_rmsnorm_fp8,
)
from cairn.kernels.layer.rope import Heads, rope_table
from cairn.kernels.matmul.skinny_plans import BESIDE_RING, skinny_is_faster
from cairn.kernels.norm.join_norm import Parts, join_add_rmsnorm, join_add_rmsnorm_fp8
from cairn.kernels.norm.layernorm import add_layernorm, layernorm
from cairn.kernels.norm.rmsnorm import (
    add_rmsnorm,
    add_rmsnorm_both,
    add_rmsnorm_fp8,
    rmsnorm,
    rmsnorm_fp8,
)
from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.models.activation import Gate
from cairn.models.attend import Attend, AttentionRule
from cairn.models.attention import Attention, joined_attentions
from cairn.models.experts import ExpertLayer
from cairn.models.fused_experts import experts_product, has_kernels, takes_float8
from cairn.models.layers import FeedForward, Norm
from cairn.models.linear.form import Entering, Epilogue, Kernels, Product
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear
from cairn.models.rope import Rotation, axis_of_columns, frequencies, rows_by_axes
from cairn.models.spec import ModelSpec, Rope
from cairn.models.transformer import Layer, Transformer

FIRST_LAYERS = 2  # nothing is added in front of the first


class Projected(Protocol):
    """An attend that takes the fused projection as it is: it norms, rotates and stores on the way.

    Where it has `axes_3T`, row t of a table belongs to token t; else a row belongs to a position.
    """

    def projected(
        self, qkv_TE: Tensor, heads: Heads, table: Tensor | None, rule: AttentionRule
    ) -> Tensor: ...


class Fused:
    """Call it as the model: tokens, positions and an attend in, hidden states [T, D] out."""

    def __init__(self, model: Transformer, context: int, invariant: bool = False) -> None:
        """`context`: positions that the rotations are tabulated for."""
        self.model, self.spec, self.context = model, model.spec, context
        self.kernels = Kernels(invariant=invariant)
        mixers = list(joined_attentions(model))
        device = model.embedding.weight.device
        self.tables = Tables({mixer.rope for mixer in mixers}, model.spec, context, device)
        self.heads = {mixer: heads_of(mixer, model.spec) for mixer in mixers}
        self.all_fused = len(mixers) == len(model.layers)
        self.most_layers: int | None = None  # None: all

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
        step = FusedStep(self, attend, rotations)
        deep = self.model.deep_rows(tokens_T)
        return self.model.through(FusedResidual(x_TD), step, taps, deep, self.most_layers)

    def warming(self) -> "Fused":
        """The same through its first layers alone, if all are alike: they launch every kernel that the others do."""
        layers = cast(Iterable[Layer], self.model.layers)
        kinds = {_kind(layer, number, self.spec) for number, layer in enumerate(layers)}
        twin = copy.copy(self)
        twin.most_layers = FIRST_LAYERS if len(kinds) == 1 else None
        return twin

    def sharing_the_chip(self, ring: int = BESIDE_RING) -> "Fused":
        """The same, in kernels that fit beside attention of other rows in another stream (`Kernels.ring`)."""
        twin = copy.copy(self)
        twin.kernels = self.kernels._replace(shares_chip=True, ring=ring)
        return twin

    def small(self, rows: int) -> bool:
        """Do all products of a layer go through the kernels that can share the chip?"""
        first = cast(Layer, self.model.layers[0])
        feed = first.feed_forward
        if self.kernels.invariant or not isinstance(feed, FeedForward) or not self.all_fused:
            return False
        maps: list[Linear] = [first.attention.qkv, first.attention.out, feed.inner, feed.down]
        alone = first.attention.out.shards.size == 1
        return alone and all(p.form is None and skinny_is_faster(rows, *p.shape_NK()) for p in maps)

    def varies(self) -> str | None:
        """Why a row's result depends on how many rows there are, even with invariant kernels; or None."""
        if not self.all_fused:
            return "its mixers run by torch, such as those whose rotation depends on a sequence's length"
        if not self.model.build.fused:
            return "its projections are apart, and torch multiplies them"
        feeds = (layer.feed_forward for layer in cast(Iterable[Layer], self.model.layers))
        experts = (feed for feed in feeds if isinstance(feed, ExpertLayer))
        if not all(has_kernels(layer, layer.router.weight.data) for layer in experts):
            return "the product of its experts is chosen by the number of rows"
        return None

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Scores [T, V], as the model's."""
        vocabulary = self.model.head or self.model.embedding
        if vocabulary.shards.size > 1:
            return self.model.logits(hidden_TD)
        scores_TV = vocabulary.logits(hidden_TD, Epilogue(kernels=self.kernels))
        cap = self.spec.logit_softcap
        return cap * torch.tanh(scores_TV / cap) if cap else scores_TV


class Tables:
    """Rotations of every position, for each kind of rotary positions of a model."""

    def __init__(
        self,
        kinds: Iterable[Rope | None],
        spec: ModelSpec,
        context: int,
        device: torch.device | str,
    ) -> None:
        self.by_position = rope_tables(kinds, spec, context, device)
        self.axis_of = {
            kind: axis_of_columns(kind, table.shape[1]).to(device)
            for kind, table in self.by_position.items()
            if kind is not None
        }

    def of(self, attend: Attend) -> dict[Rope | None, Tensor]:
        """Rotation tables by position, or by token if images have row and column positions."""
        axes_3T: Tensor | None = getattr(attend, "axes_3T", None)
        if axes_3T is None:
            return self.by_position
        axes = self.axis_of.items()
        return {
            kind: rows_by_axes(self.by_position[kind], axes_3T, axis_C) for kind, axis_C in axes
        }


class FusedForm(Protocol):
    """Fused form of a model or of its draft head."""

    kernels: Kernels
    tables: Tables
    heads: dict[Attention, Heads]


class FusedStep:
    """A pass with fused kernels."""

    fuses = True

    def __init__(self, form: FusedForm, attend: Attend, rotations: dict[Rope, Rotation]) -> None:
        self.form, self.attend, self.rotations = form, attend, rotations
        self.tables = form.tables.of(attend)

    def run(self, layer: Any, residual: Any) -> Any:
        return layer(residual, self)

    def rotation(self, rope: Rope | None) -> Rotation | None:
        return None if rope is None else self.rotations[rope]

    def columns(
        self,
        part: ColumnParallelLinear,
        x: "FusedInput",
        gate: Gate | None = None,
        then: RowParallelLinear | None = None,
    ) -> Tensor:
        rows, kernels = len(x.x_TD), self.form.kernels
        entering = x.quantized if part.quantizes(rows, kernels) else x.tensor
        quantizes = then is not None and then.quantizes(rows, kernels)
        return cast(Tensor, part.product(entering, Epilogue(gate, None, kernels, quantizes)))

    def rows(self, part: RowParallelLinear, x: Entering, onto: Tensor | None) -> Product:
        return part.product(x, Epilogue(None, onto, self.form.kernels))

    def experts(self, part: ExpertLayer, x: "FusedInput") -> Product:
        if not has_kernels(part, x.x_TD):
            return part.plain(x.tensor, self)
        rows_TD = x.beside if takes_float8(part) else None
        slots_GT: Tensor | None = getattr(self.attend, "slots_GT", None)  # where it has pages
        slots_T, shared = None if slots_GT is None else slots_GT[0], part.shared
        onto_TD = x.onto if shared is None else None
        y_TD = experts_product(part, x.tensor, onto_TD, self.form.kernels, slots_T, rows_TD)
        if shared is None:
            return y_TD
        inner_TF = self.columns(shared.inner, x, shared.gate)
        shared_TD = cast(Tensor, self.rows(shared.down, inner_TF, None))
        return cast(Tensor, y_TD) + shared.weighed(shared_TD, x.tensor)

    def attended(self, mixer: Attention, qkv_TE: Tensor) -> Tensor:
        heads, table = self.form.heads[mixer], self.tables.get(mixer.rope)
        attend = cast(Projected, self.attend)
        return attend.projected(qkv_TE, heads, table, mixer.rule).flatten(-2)


class FusedResidual(NamedTuple):
    """The residual, and what is added to it by the next norm. Both are overwritten on the way."""

    x_TD: Tensor
    pending: Product = None

    def normed(self, norm: Norm, post_norm: Norm | None = None) -> "FusedInput":
        return FusedInput(self.pending, self.x_TD, norm, post_norm)

    def plus(self, y_TD: Tensor) -> "FusedResidual":
        self.x_TD.add_(y_TD)
        return self

    def hidden(self) -> Tensor:
        if self.pending is None:
            return self.x_TD.clone()
        return (self.x_TD + _summed(self.pending)).to(self.x_TD.dtype)


class FusedInput:
    """The normed residual. It is computed when the first part reads it, as that part takes it: in 16 or in 8 bits."""

    def __init__(
        self, pending: Product, x_TD: Tensor, norm: Norm, post_norm: Norm | None = None
    ) -> None:
        self.x_TD, self.norm, self.post_norm = x_TD, norm, post_norm
        self._pending, self._read = pending, False

    @cached_property
    def tensor(self) -> Tensor:
        return _add_norm(self._take_pending(), self.x_TD, self.norm)

    @cached_property
    def quantized(self) -> Quantized:
        """The normed input as float8 rows."""
        if not self.norm.is_rms:
            return quantize(self.tensor)
        return _add_norm_fp8(self._take_pending(), self.x_TD, self.norm)

    @cached_property
    def beside(self) -> Quantized | None:
        """float8 rows of `tensor`, which is computed in the same pass; None: there is no such pass."""
        y, norm = self._pending, self.norm
        if not isinstance(y, Tensor) or not norm.is_rms:
            return None
        self._take_pending()
        weight, how = norm.weight.data, {"plus_one": norm.plus_one, "prefetch": True}
        x_TD = self.x_TD
        self.__dict__["tensor"], rows, _ = add_rmsnorm_both(
            y, x_TD, weight, norm.eps, residual_out=x_TD, **how
        )
        return rows

    def _take_pending(self) -> Product:
        """Take the pending addend; it can be taken once."""
        y, self._pending, self._read = self._pending, None, True
        return y

    @property
    def onto(self) -> Tensor | None:
        return self.x_TD if self.post_norm is None else None

    def add(self, y: Product) -> FusedResidual:
        if not self._read:  # what was pending belongs to the residual, even if it was read
            _ = self.tensor
        if self.post_norm is not None:
            y = normed(cast(Tensor, y), self.post_norm)
        return FusedResidual(self.x_TD, y)


def _kind(layer: Layer, number: int, spec: ModelSpec) -> tuple[object, ...]:
    """Equal for layers that launch the same kernels: the same parts with weights in the same forms."""
    parts = []
    for part in layer.modules():
        forms = (getattr(part, "form", None), *(getattr(part, "forms", None) or ()))
        weights = [(one.shape, one.dtype) for one in part.parameters(recurse=False)]
        size = part.read_bytes() if isinstance(part, Linear) else 0
        parts.append((type(part), *map(type, forms), *weights, size))
    return (*parts, spec.window(number), spec.rope_of(number))


def normed(x_TD: Tensor, norm: Norm) -> Tensor:
    if isinstance(norm, Norm) and norm.bias is not None:
        return layernorm(x_TD, norm.weight.data, norm.bias.data, norm.eps)
    if not norm.is_rms:
        return norm(x_TD)
    return rmsnorm(x_TD, norm.weight.data, norm.eps, plus_one=norm.plus_one, prefetch=True)


def _add_norm(y: Product, x_TD: Tensor, norm: Norm) -> Tensor:
    """Adds y to x, where x lies, and norms the sum."""
    if isinstance(y, Tensor) and isinstance(norm, Norm) and norm.bias is not None:
        parameters = (norm.weight.data, norm.bias.data, norm.eps)
        return add_layernorm(y, x_TD, *parameters, out=y, residual_out=x_TD)
    if y is not None and not norm.is_rms:
        x_TD.add_(_summed(y))
        y = None
    if y is None:
        return normed(x_TD, norm)
    weight, how = norm.weight.data, {"plus_one": norm.plus_one, "prefetch": True}
    if isinstance(y, Parts):
        return join_add_rmsnorm(y, x_TD, weight, norm.eps, residual_out=x_TD, **how)[0]
    if isinstance(y, Choices):
        plus_one = norm.plus_one
        return combine_add_rmsnorm(y, x_TD, weight, norm.eps, plus_one=plus_one, residual_out=x_TD)[
            0
        ]
    return add_rmsnorm(y, x_TD, weight, norm.eps, out=y, residual_out=x_TD, **how)[0]


def _summed(y: Tensor | Parts | Choices) -> Tensor:
    if isinstance(y, Parts):
        return y.sums_SMD.sum(0)
    return combine(*y) if isinstance(y, Choices) else y


def _add_norm_fp8(y: Product, x_TD: Tensor, norm: Norm) -> Quantized:
    """The same for an RMSNorm, with the result as float8 rows."""
    weight, how = norm.weight.data, {"plus_one": norm.plus_one, "prefetch": True}
    if y is None:
        return rmsnorm_fp8(x_TD, weight, norm.eps, **how)
    if isinstance(y, Parts):
        return join_add_rmsnorm_fp8(y, x_TD, weight, norm.eps, residual_out=x_TD, **how)[0]
    if isinstance(y, Choices):
        plus_one = norm.plus_one
        return combine_add_rmsnorm_fp8(
            y, x_TD, weight, norm.eps, plus_one=plus_one, residual_out=x_TD
        )[0]
    return add_rmsnorm_fp8(y, x_TD, weight, norm.eps, residual_out=x_TD, **how)[0]


def heads_of(mixer: Attention, spec: ModelSpec) -> Heads:
    norms = mixer.head_norms
    weights = (None, None) if norms is None else (norms[0].weight.data, norms[1].weight.data)
    return Heads(mixer.heads, mixer.kv_heads, *weights, spec.norm_eps, spec.norm_plus_one)


def rope_tables(
    kinds: Iterable[Rope | None], spec: ModelSpec, context: int, device: torch.device | str
) -> dict[Rope | None, Tensor]:
    """Cosines and sines of every position, for each kind of rotary positions whose angles depend on nothing else."""
    tables: dict[Rope | None, Tensor] = {}
    for kind in kinds:
        if kind is not None and kind.is_tabulated:
            angles, amplitude = frequencies(kind, spec, torch.device(device))
            tables[kind] = rope_table(angles, context, amplitude)
    return tables
