"""A step of packed weights through all layers in one compiled call.

    Lean             Python calls seven compiled operations for each layer
    CompiledLayers   the same operations in the same order, without Python between them: decode steps, drafts that are
                     verified, pieces of prompts, any of them together. What is seen both ways, and steps whose products
                     are faster in floating point, go to Lean

With a small model on a CPU, Python between the operations is a tenth of a step and more. Numbers are the same to the
bit. Knows layers of joined heads and a gated feed-forward whose maps are all packed blocks (`obstacle`).
"""

import ctypes
from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor

from cairn.kernels.cpu.compiled import library
from cairn.kernels.cpu.decoder_layer import DecoderLayer
from cairn.kernels.cpu.packed_product import GATES, NormWeight, pool
from cairn.kernels.cpu.paged_decode import Sequences, fits
from cairn.models.layers import FeedForward, Norm
from cairn.models.lean import Angles, Lean, LeanResidual
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.maps import Linear
from cairn.models.spec import Rope
from cairn.models.transformer import Layer, ended
from cairn.serve.engine.pages import Paged, PagePool


def obstacle(lean: Lean, pages: PagePool) -> str | None:
    """Why a step of this model cannot be compiled as a whole, or None."""
    if not fits(pages.cache):
        return "its cache is not in float32"
    if lean.spec.deep_rows:
        return "pictures add rows behind its first layers"
    for number, layer in enumerate(lean.model.layers):
        if (why := _obstacle(lean, cast(Layer, layer))) is not None:
            return f"layer {number}: {why}"
    return None


def _obstacle(lean: Lean, layer: Layer) -> str | None:
    mixer, block = layer.attention, layer.feed_forward
    if mixer not in lean.decode_heads or mixer.norms_width:
        return "its heads have no compiled form"
    if not isinstance(block, FeedForward) or not block.gate.gated:
        return "its feed-forward has no gate"
    if block.gate.activation not in GATES:
        return f"its activation {block.gate.activation} has no compiled form"
    maps = (mixer.qkv, mixer.out, block.inner, block.down)
    if not all(isinstance(part.form, BlocksForm) and part.addend is None for part in maps):
        return "not all of its maps are packed blocks"
    if len(cast(BlocksForm, block.inner.form).matrix.blocks) != 2:
        return "its gate is not a matrix of its own"
    if mixer.qkv not in lean.norm_of or block.inner not in lean.norm_of:
        return "its norms have no compiled form"
    behind = (layer.attention_post_norm, layer.feed_forward_post_norm)
    if any(norm is not None and norm not in lean.norms_behind for norm in behind):
        return "what it adds is scaled"
    return None


class CompiledLayers:
    """Call it as the model."""

    def __init__(self, lean: Lean, pages: PagePool) -> None:
        self.lean, self.pages = lean, pages
        layers = [cast(Layer, layer) for layer in lean.model.layers]
        self.kinds = list(lean.frequencies)
        self._kept: list[object] = []  # whose addresses are used
        compiled = [self._layer(layer) for layer in layers]
        self.layers = (DecoderLayer * len(compiled))(*compiled)
        forms = [cast(BlocksForm, part.form) for part in self._maps(layers)]
        self.room = max(map(_room, layers))
        self._most_rows = min(form.float_rows for form in forms)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Paged) -> Tensor:
        return self.tapped(tokens_T, positions_T, attend)[0]

    def tapped(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Paged, taps: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The same, and the hidden states behind the layers in `taps`."""
        sequences, lean = attend.sequences, self.lean
        if sequences is None or positions_T.shape[0] >= self._most_rows:
            return lean.tapped(tokens_T, positions_T, attend, taps)
        x_TD = lean.model.embed(tokens_T, positions_T).contiguous()
        step = _Step(self, x_TD, sequences, lean.angles(positions_T, attend))
        tapped: list[Tensor] = []
        start = 0
        for tap in sorted(taps):
            step.run(start, tap + 1)
            tapped.append(x_TD.clone())
            start = tap + 1
        step.run(start, len(self.layers))
        hidden_TD = ended(LeanResidual(x_TD, lean).normed(lean.model.norm).tensor, lean.spec)
        return hidden_TD, tapped

    def _maps(self, layers: list[Layer]) -> list[Linear]:
        blocks = [cast(FeedForward, layer.feed_forward) for layer in layers]
        attentions = [
            part for layer in layers for part in (layer.attention.qkv, layer.attention.out)
        ]
        return [*attentions, *(part for block in blocks for part in (block.inner, block.down))]

    def _layer(self, layer: Layer) -> DecoderLayer:
        mixer, block, lean = layer.attention, cast(FeedForward, layer.feed_forward), self.lean
        behind = [
            None if norm is None else lean.norms_behind[cast(Norm, norm)]
            for norm in (layer.attention_post_norm, layer.feed_forward_post_norm)
        ]
        maps = (
            self._matrix(mixer.qkv),
            self._matrix(mixer.out, add=behind[0] is None),
            self._matrix(block.inner, gate=block.gate.activation),
            self._matrix(block.down, add=behind[1] is None),
        )
        number, heads = mixer.plain_rule.layer, lean.decode_heads[mixer]
        self._kept += [heads, *behind, lean.norm_of[mixer.qkv], lean.norm_of[block.inner]]
        return DecoderLayer(
            *maps,
            *map(_address, (lean.norm_of[mixer.qkv], lean.norm_of[block.inner], *behind)),
            ctypes.addressof(heads.struct),
            *self.pages.addresses[number],
            self.pages.group_of[number],
            -1 if mixer.rope is None else self.kinds.index(mixer.rope),
        )

    def _matrix(self, part: Linear, gate: str | None = None, add: bool = False) -> int:
        struct = cast(BlocksForm, part.form).matrix.struct_of(part.form_bias, gate, add)
        self._kept.append(struct)
        return ctypes.addressof(struct)


class _Step:
    """State shared by the layers of a step."""

    def __init__(
        self, form: CompiledLayers, x_TD: Tensor, sequences: Sequences, angles: dict[Rope, Angles]
    ) -> None:
        self.layers, self.x_TD, self.sequences = form.layers, x_TD, sequences
        self._angles = [[part.contiguous() for part in angles[kind]] for kind in form.kinds]
        self._tables = [
            (ctypes.c_void_p * len(self._angles))(*(parts[i].data_ptr() for parts in self._angles))
            for i in (0, 1)
        ]
        self._room = torch.empty(len(x_TD) * form.room)
        self._run = library().cairn_layers

    def run(self, first: int, last: int) -> None:
        """The residual through these layers, in place."""
        x_TD, room = self.x_TD, ctypes.c_void_p(self._room.data_ptr())
        layers = ctypes.byref(self.layers, first * ctypes.sizeof(DecoderLayer))
        failed = self._run(
            *(pool().address, layers, last - first, self.sequences.array, *self._tables),
            *(ctypes.c_void_p(x_TD.data_ptr()), *x_TD.shape, room),
        )
        if failed:
            raise MemoryError(f"no memory for {len(x_TD)} rows of activations")


def _room(layer: Layer) -> int:
    """Numbers of a row that a layer holds at once beside the residual: what it attends with, or its gate."""
    mixer, block = layer.attention, cast(FeedForward, layer.feed_forward)
    parts = (mixer.qkv, mixer.out, block.inner)
    qkv, out, inner = (cast(BlocksForm, part.form).matrix for part in parts)
    return out.outputs + max(qkv.outputs + out.columns, inner.part_rows[0])


def _address(norm: NormWeight | None) -> int | None:
    return None if norm is None else ctypes.addressof(norm.struct)
