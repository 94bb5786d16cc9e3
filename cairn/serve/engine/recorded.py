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
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from cairn.models.experts import ExpertLayer
from cairn.models.layers import Columns, Rows
from cairn.models.lean import Joined, Lean, Turn
from cairn.models.packed_weights import Int8
from cairn.models.transformer import Layer, Transformer
from cairn.serve.engine.pages import NULL_PAGE, Alone, Paged, PagePool

Views = tuple[Tensor, ...]  # of each layer


def obstacle(model: Transformer) -> str | None:
    """Why a step of this model cannot be recorded, or None."""
    layers = [cast(Layer, layer) for layer in model.layers]
    if any(isinstance(layer.feed_forward, ExpertLayer) for layer in layers):
        return "which experts work is decided in each step"
    if any(layer.attention.rule.window or layer.attention.rule.softcap for layer in layers):
        return "its attention has a window or a cap"
    if len({model.spec.rope_of(layer) for layer in range(len(layers))}) > 1:
        return "its layers rotate differently"
    maps = [part for part in model.layers.modules() if isinstance(part, Columns | Rows)]
    if any(isinstance(part.packed, Int8) for part in maps):
        return "torch cannot record its 8-bit products"
    kept = [part for part in maps if part.packed is None or isinstance(part, Rows)]
    if any(weight.requires_grad for part in kept for weight in _used(part)):
        return "its weights may be trained"
    return None


def _used(part: Columns | Rows) -> Iterator[Tensor]:
    """The parameters that it computes with."""
    whole = part.packed is None
    return (p for name, p in part.named_parameters() if whole or name.endswith("bias"))


class Recorded:
    """Call it as the model."""

    def __init__(self, lean: Lean, pool: PagePool) -> None:
        self.lean = lean
        self._replay = self._record(Alone.of(pool.by_slot, NULL_PAGE, NULL_PAGE, 1))

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Paged) -> Tensor:
        alone = attend.alone
        if alone is None:
            return self.lean(tokens_T, positions_T, attend)
        x_1D, (turn,) = self.lean.model.embed(tokens_T, positions_T), self.lean.turns(positions_T)
        out_1D = self._replay(x_1D, turn.cos, turn.sin, alone.new, alone.keys, alone.values)
        if alone.kept is not None:
            alone.kept.home.copy_(alone.kept.new)
        return out_1D

    @torch.inference_mode()
    def _record(self, alone: Alone) -> Callable[..., Tensor]:
        """What it computes on the way goes to the page that belongs to nobody."""
        shape, layers = alone.shape, self.lean.layers

        def step(x_1D: Tensor, cos: Tensor, sin: Tensor, new: Views, keys: Views,
                 values: Views) -> Tensor:  # fmt: skip
            attend = cast(Joined, Alone(shape, new, keys, values, 0))
            for layer in layers:
                layer(x_1D, Turn(cos, sin), attend)
            return self.lean.norm(x_1D)

        nowhere = torch.zeros(1, dtype=torch.int32)
        (turn,) = self.lean.turns(nowhere)
        example: Any = (self.lean.model.embed(nowhere, nowhere), turn.cos, turn.sin, alone.new,
                        alone.keys, alone.values)  # fmt: skip
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


def serving_form(model: Transformer, pool: PagePool) -> Recorded | Lean:
    """The fastest of the forms that a model on a CPU has."""
    lean = Lean(model)
    return lean if obstacle(model) else Recorded(lean, pool)
