"""Norms and the dense feed-forward of a decoder layer, on packed tokens [T, D]."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.activation import Gate
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.layer_loop import ForwardStep, Input, Sublayer
from cairn.models.linear.form import Product
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.shards import ALONE, Shards
from cairn.models.spec import ModelSpec


class Norm(SlotModule):
    """RMSNorm or LayerNorm, in float32; Gemma's weights are offsets from one."""

    def __init__(
        self, build: ModelBuild, spec: ModelSpec, width: int, shards: Shards = ALONE
    ) -> None:
        super().__init__()
        self.eps, self.plus_one, self.shards = spec.norm_eps, spec.norm_plus_one, shards
        self.weight = build.parameter(width)
        self.bias = build.parameter(width) if spec.norm == "layer" else None

    @property
    def is_rms(self) -> bool:
        """Return whether this is an RMS norm rather than a layer norm."""
        return self.bias is None

    def forward(self, x: Tensor) -> Tensor:
        # A norm of sharded heads is itself whole on every rank, but sees only some of the heads:
        # `whole` sums its gradient over the ranks.
        weight = self.shards.whole(self.weight)
        if self.bias is not None:
            return F.layer_norm(x, weight.shape, weight, self.shards.whole(self.bias), self.eps)
        if x.dtype == torch.float32 and not x.is_cuda and not self.plus_one:
            # What stands below, in fewer calls.
            return F.rms_norm(x, weight.shape, weight, self.eps)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.plus_one:
            return (wide * (1.0 + weight.float())).to(x.dtype)
        return weight * wide.to(x.dtype)

    def slots(self) -> Iterator[Slot]:
        shape = tuple(self.weight.shape)
        yield Slot("weight", "weight", shape, init="zeros" if self.plus_one else "ones")
        if self.bias is not None:
            yield Slot("bias", "bias", shape, init="zeros")


class Unnormed(nn.Module):
    """Identity in place of an input norm (OLMo 2)."""

    is_rms = False

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD


class ScaledOutput(nn.Module):
    """Scaling of a block's output in place of an output norm (Granite)."""

    is_rms = False

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x_TD: Tensor) -> Tensor:
        return x_TD * self.scale


def input_norm(build: ModelBuild, spec: ModelSpec) -> Norm | Unnormed:
    """Norm of a block's input."""
    return Norm(build, spec, spec.hidden) if spec.pre_norms else Unnormed()


def output_norm(build: ModelBuild, spec: ModelSpec) -> Norm | ScaledOutput | None:
    """Norm of a block's output before the residual addition, or None."""
    if spec.post_norms:
        return Norm(build, spec, spec.hidden)
    return None if spec.residual_scale == 1.0 else ScaledOutput(spec.residual_scale)


class FeedForward(Sublayer):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where there is no gate."""

    def __init__(self, build: ModelBuild, spec: ModelSpec, intermediate: int) -> None:
        super().__init__()
        names = ("gate", "up") if spec.gated else ("up",)
        self.gate = Gate(spec.activation, spec.gated)
        self.inner = ColumnParallelLinear(
            build, spec.hidden, dict.fromkeys(names, intermediate), spec.mlp_bias
        )
        self.down = RowParallelLinear(build, intermediate, spec.hidden, spec.mlp_bias)

    @property
    def entry(self) -> ColumnParallelLinear:
        return self.inner

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down(self.gate.of(self.inner(x_TD)))

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        return self(x_TD)

    def fused(self, x: Input, step: ForwardStep) -> Product:
        return step.rows(self.down, step.columns(self.inner, x, self.gate, self.down), x.onto)
