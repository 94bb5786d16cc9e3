"""A decode step of one sequence, recorded once and replayed: no Python between its operations.

    Lean        every step: Python calls the thousand operations of a model one after another
    Recorded    one token of one sequence: torch's interpreter calls the same operations with the same numbers;
                anything else goes to Lean

On a CPU, with a small model and one stream, what Python does between operations is a third of a step. The record holds
the operations in their order, not what Python decided on the way; so a model has one only if nothing is decided that
could be otherwise in a later step (`obstacle`). What does change comes in: the token's row, its angles, and views of
the keys and values so far.
"""

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from cairn.models.attend import Attend
from cairn.models.attention import joined_attentions
from cairn.models.experts import ExpertLayer
from cairn.models.layers import Norm
from cairn.models.lean import Angles, Lean, LeanResidual, LeanStep
from cairn.models.linear.blocks import BlocksForm
from cairn.models.linear.maps import Linear
from cairn.models.linear.packed import Int8
from cairn.models.transformer import Layer, Transformer
from cairn.serve.engine.compiled_layers import CompiledLayers
from cairn.serve.engine.compiled_layers import obstacle as compiled_obstacle
from cairn.serve.engine.pages import NULL_PAGE, Paged, PagePool
from cairn.serve.engine.single_sequence import SingleToken

Views = tuple[Tensor, ...]  # of each layer


def obstacle(model: Transformer) -> str | None:
    """Why a step of this model cannot be recorded, or None."""
    layers = [cast(Layer, layer) for layer in model.layers]
    if any(isinstance(layer.feed_forward, ExpertLayer) for layer in layers):
        return "which experts work is decided in each step"
    if len(list(joined_attentions(model))) < len(layers):
        return "its rotation depends on how long a sequence is, or it has another mixer"
    if any(layer.attention.rule.window or layer.attention.rule.by_scores for layer in layers):
        return "its attention has a window or a cap"
    if len({layer.attention.rope for layer in layers}) > 1:
        return "its layers rotate differently"
    if model.spec.deep_rows:
        return "pictures add rows behind its first layers"
    maps = [part for part in model.layers.modules() if isinstance(part, Linear)]
    if any(isinstance(part.form, Int8 | BlocksForm) for part in maps):
        return "torch cannot record its packed products"
    if any(part.addend is not None for part in maps):
        return "adapters change from step to step"
    if any(weight.requires_grad for weight in _used(model)):
        return "its weights may be trained"
    return None


def _used(model: Transformer) -> Iterator[Tensor]:
    """The parameters that a step computes with."""
    for module in model.layers.modules():
        if isinstance(module, Linear):
            replaced = module.form is not None and module.form.covers(1)
            yield from () if replaced else module.matrices()
        elif isinstance(module, Norm) and module.bias is not None:
            yield from (module.weight, module.bias)


class Recorded:
    """Call it as the model."""

    def __init__(self, lean: Lean, pool: PagePool) -> None:
        self.lean = lean
        self._replay = self._record(SingleToken.of(pool.by_slot, NULL_PAGE, NULL_PAGE, 1))

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Paged) -> Tensor:
        alone = attend.single_token
        if alone is None:
            return self.lean(tokens_T, positions_T, attend)
        x_1D = self.lean.model.embed(tokens_T, positions_T)
        angles = self._angles(positions_T, attend)
        out_1D = self._replay(x_1D, *angles, alone.new, alone.keys, alone.values)
        if alone.kept is not None:
            alone.kept.home.copy_(alone.kept.new)
        return out_1D

    def tapped(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Paged, taps: Collection[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Hidden states of chosen layers are not recorded: the lean form hands them out."""
        return self.lean.tapped(tokens_T, positions_T, attend, taps)

    def _angles(self, positions_T: Tensor, attend: Attend | None = None) -> Angles:
        """Angles of the layers' only RoPE; placeholders for learned positions."""
        for angles in self.lean.angles(positions_T, attend).values():
            return angles
        return Angles(positions_T, positions_T)

    @torch.inference_mode()
    def _record(self, alone: SingleToken) -> Callable[..., Tensor]:
        """Record a step; values computed while recording go to the null block."""
        shape, lean = alone.shape, self.lean

        def step(
            x_1D: Tensor, cos: Tensor, sin: Tensor, new: Views, keys: Views, values: Views
        ) -> Tensor:
            attend = cast(Attend, SingleToken(shape, new, keys, values, 0))
            angles = dict.fromkeys(lean.frequencies, Angles(cos, sin))
            return lean.model.through(LeanResidual(x_1D, lean), LeanStep(lean, attend, angles))[0]

        zero = torch.zeros(1, dtype=torch.int32)
        x_1D = lean.model.embed(zero, zero)
        example: Any = (x_1D, *self._angles(zero), alone.new, alone.keys, alone.values)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            # Shapes are recorded as they are: a replayed step has one token, too.
            warnings.simplefilter("ignore", torch.jit.TracerWarning)
            recorded: Any = torch.jit.trace(step, example, check_trace=False)

        def replay(*inputs: Tensor | Views) -> Tensor:
            # Unoptimised: there is nothing to gain, and looking for it takes seconds.
            with torch.jit.optimized_execution(False):
                return recorded(*inputs)

        return replay


def serving_form(model: Transformer, pool: PagePool) -> Recorded | CompiledLayers | Lean:
    """The fastest of the forms that a model on a CPU has."""
    lean = Lean(model)
    if lean.compiled and compiled_obstacle(lean, pool) is None:
        return CompiledLayers(lean, pool)
    return lean if obstacle(model) else Recorded(lean, pool)
