"""The short convolution of LFM2: a gate before it and a gate behind it, and a state of two tokens.

b, c, x = in(x);   out(c * convolution(b * x))        over the last 3 tokens of each column
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.kernels.delta.rule import Sequences, short_conv_reference
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.layer_loop import ForwardStep, Sublayer
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.mixer import MIXERS, Plane
from cairn.models.recurrence import Planes, recur
from cairn.models.shards import even_share
from cairn.models.spec import ModelSpec


class ShortConv(Sublayer, SlotModule):
    def __init__(self, build: ModelBuild, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        if spec.short_conv is None:
            raise ConfigError(f"layer {layer} is a convolution, and the spec has no sizes for it")
        self.layer, self.shards, bias = layer, build.shards, spec.short_conv.bias
        self.width = even_share(spec.hidden, build.shards, "columns of a short convolution")
        self.inner = ColumnParallelLinear(
            build, spec.hidden, dict.fromkeys("bcx", spec.hidden), bias
        )
        self.conv_D1W = build.parameter(self.width, 1, spec.short_conv.kernel)
        self.bias_D = build.parameter(self.width) if bias else None
        self.projection = RowParallelLinear(build, spec.hidden, spec.hidden, bias)
        self.planes: tuple[Plane, ...] = MIXERS["short_conv"].shape.planes(spec, build.shards.size)

    def slots(self) -> Iterator[Slot]:
        whole, first = self.width * self.shards.size, self.width * self.shards.rank
        cut = (0, first, first + self.width) if self.shards.size > 1 else None
        shape = (whole, *self.conv_D1W.shape[1:])
        yield Slot("conv.weight", "conv_D1W", shape, cut=cut, init="fan_in")
        if self.bias_D is not None:
            yield Slot("conv.bias", "bias_D", (whole,), cut=cut, init="zeros")

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        before_TD, behind_TD, x_TD = self.inner(x_TD)
        return self.projection(behind_TD * recur(step.attend, self, (before_TD * x_TD,)))

    def several(self, inputs: Planes, state: Planes) -> tuple[Tensor, Planes]:
        y_SD, before_WD = short_conv_reference(inputs[0], state[0], self.conv_D1W[:, 0])
        return self._biased(y_SD), (before_WD,)

    def single(self, inputs: Planes, states: Planes) -> tuple[Tensor, Planes]:
        y_B1D, before_BWD = short_conv_reference(inputs[0][:, None], states[0], self.conv_D1W[:, 0])
        return self._biased(y_B1D[:, 0]), (before_BWD,)

    @property
    def has_kernels(self) -> bool:
        return True

    def in_slots(self, inputs: Planes, planes: Planes, sequences: Sequences) -> Tensor:
        from cairn.kernels.delta.short_conv import short_conv

        return self._biased(short_conv(inputs[0], self.conv_D1W[:, 0], planes[0], sequences))

    def _biased(self, y_TD: Tensor) -> Tensor:
        return y_TD if self.bias_D is None else torch.add(y_TD, self.bias_D)
