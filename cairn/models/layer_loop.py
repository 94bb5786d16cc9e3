"""The layers of a decoder, one after another: the order of norm, mixer, add, norm, feed-forward, add stands here alone.

    residual -normed-> input -mixer-> y -add-> residual -normed-> input -feed-forward-> y -add-> residual

What a part does depends on the step, not on the loop. Each form of the model brings its own residual and step:

    plain      torch, with gradients: `PlainResidual`, `PlainStep`                         models/transformer.py
    fused      our GPU kernels: an addend waits and is added by the norm that follows       models/fused.py
    lean       a CPU, few operations: sums are made in place                                models/lean.py
    training   norm and product are one operation that may forget the norm                  train/fused_forward.py

A step may wrap a layer (`run`: recomputation), and a stage of a pipeline runs some of the layers.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from cairn.models.activation import Gate
from cairn.models.attend import Attend
from cairn.models.linear.form import Product
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.rope import Rotation
from cairn.models.spec import Rope


class Input(Protocol):
    """The normed residual, which a mixer or a feed-forward starts from."""

    @property
    def tensor(self) -> Tensor:
        """[T, D]."""
        ...

    @property
    def onto(self) -> Tensor | None:
        """The residual, where a product may add its result to it; None: there is a norm in between."""
        ...

    def add(self, y: Any, /) -> "Residual":
        """The residual that this was normed from plus y, which is normed first if the layer has a norm for that."""
        ...


class Residual(Protocol):
    """The stream that every part reads and adds to."""

    def normed(self, norm: Any, post_norm: Any = None, /) -> Input:
        """`post_norm`: of what will be added."""
        ...

    def hidden(self) -> Tensor:
        """The sum itself, [T, D], which no later layer overwrites."""
        ...


class ForwardStep(Protocol):
    """Interface of a pass over tokens: their attention, and the implementation of the sublayers."""

    attend: Attend
    fuses: bool  # parts run their `fused` form, through the operations below

    def run(self, layer: Any, residual: Any) -> Any:
        """Run a layer by calling the module, so that its hooks run (FSDP)."""
        ...

    def rotation(self, rope: Rope | None) -> Rotation | None:
        """Rotation for a mixer in its plain form."""
        ...

    def columns(
        self,
        part: ColumnParallelLinear,
        x: Any,
        gate: Gate | None = None,
        then: RowParallelLinear | None = None,
    ) -> Any:
        """The joined projection of an input, through an activation if one is given; `then` multiplies the result."""
        ...

    def rows(self, part: RowParallelLinear, x: Any, onto: Tensor | None) -> Product:
        """The projection back to the width of the residual."""
        ...

    def experts(self, part: Any, x: Any) -> Product:
        """A mixture of experts, of an input."""
        ...

    def attended(self, mixer: Any, qkv_TE: Any) -> Tensor:
        """Joined heads normed, rotated, stored and attended; [T, H * C]."""
        ...


class Sublayer(nn.Module):
    """A mixer or a feed-forward, in two forms that compute the same."""

    @property
    def entry(self) -> ColumnParallelLinear | None:
        """The map that alone reads the normed residual, where there is one."""
        return None

    def plain(self, x_TD: Tensor, step: ForwardStep, /) -> Tensor:
        """Reference implementation with torch, with gradients."""
        raise NotImplementedError

    def fused(self, x: Input, step: ForwardStep) -> Product:
        """Through the larger operations of the step."""
        return self.plain(x.tensor, step)

    def compute(self, x: Input, step: ForwardStep) -> Product:
        return self.fused(x, step) if step.fuses else self.plain(x.tensor, step)


def run_layer(layer: Any, residual: Residual, step: ForwardStep) -> Residual:
    x = residual.normed(layer.attention_norm, layer.attention_post_norm)
    residual = x.add(layer.attention.compute(x, step))
    x = residual.normed(layer.feed_forward_norm, layer.feed_forward_post_norm)
    return x.add(layer.feed_forward.compute(x, step))


def run_layers(
    layers: Iterable[tuple[int, Any]],
    residual: Any,
    step: ForwardStep,
    taps: Collection[int] = (),
    deep: Sequence[Tensor] = (),
) -> tuple[Any, list[Tensor]]:
    """The residual behind the last layer, and the hidden states behind each layer in `taps`, in order.

    `deep`: what is added behind the first layers; only forms that serve take it.
    """
    tapped = []
    for number, layer in layers:
        residual = step.run(layer, residual)
        if number < len(deep):
            residual = residual.plus(deep[number])
        if number in taps:
            tapped.append(residual.hidden())
    return residual, tapped


class PlainResidual(NamedTuple):
    x_TD: Tensor

    def normed(self, norm: nn.Module, post_norm: nn.Module | None = None) -> "PlainInput":
        return PlainInput(norm(self.x_TD), self.x_TD, post_norm)

    def plus(self, y_TD: Tensor) -> "PlainResidual":
        return PlainResidual(self.x_TD + y_TD)

    def hidden(self) -> Tensor:
        return self.x_TD


class PlainInput(NamedTuple):
    tensor: Tensor
    x_TD: Tensor
    post_norm: nn.Module | None
    onto: Tensor | None = None

    def add(self, y_TD: Any) -> PlainResidual:
        return PlainResidual(self.x_TD + (y_TD if self.post_norm is None else self.post_norm(y_TD)))


class PlainStep:
    """Everything in torch, one operation after another."""

    fuses = False

    def __init__(self, attend: Attend, rotations: dict[Rope, Rotation]) -> None:
        self.attend, self.rotations = attend, rotations

    def run(self, layer: Any, residual: Any) -> Any:
        return layer(residual, self)

    def rotation(self, rope: Rope | None) -> Rotation | None:
        return None if rope is None else self.rotations[rope]

    def columns(
        self,
        part: ColumnParallelLinear,
        x: Any,
        gate: Gate | None = None,
        then: RowParallelLinear | None = None,
    ) -> Any:
        raise NotImplementedError("the plain form multiplies through the maps themselves")

    def rows(self, part: RowParallelLinear, x: Any, onto: Tensor | None) -> Product:
        raise NotImplementedError("the plain form multiplies through the maps themselves")

    def experts(self, part: Any, x: Any) -> Product:
        raise NotImplementedError("the plain form runs the experts themselves")

    def attended(self, mixer: Any, qkv_TE: Any) -> Tensor:
        raise NotImplementedError("the plain form attends through the mixer itself")
