"""The gated delta net of Qwen3-Next and Qwen3.5: linear attention with a state that forgets and overwrites.

    x -> q, k, v -convolution of 4 tokens, SiLU-> unit q, k -delta rule-> y -norm, times SiLU(z)-> out
    x -> b, a      beta = sigmoid(b): how much of a key's value is replaced; g = -exp(A) softplus(a + dt): how it fades

A state is the last inputs of the convolution and one matrix [K, V] for each head, in float32.
"""

from collections.abc import Iterator

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.core.errors import ConfigError
from cairn.kernels.delta.rule import (
    DeltaCall,
    Sequences,
    delta_chunk_reference,
    delta_step_reference,
    obstacle,
    short_conv_reference,
    unit_length,
)
from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.layer_loop import ForwardStep, Sublayer
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.mixer import MIXERS, Plane
from cairn.models.recurrence import Planes, recur
from cairn.models.shards import even_share
from cairn.models.spec import ModelSpec


class DeltaNet(Sublayer, SlotModule):
    def __init__(self, build: ModelBuild, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        if spec.delta is None:
            raise ConfigError(f"layer {layer} is a delta net, and the spec has no sizes for it")
        self.layer, self.eps, self.shards = layer, spec.norm_eps, build.shards
        # Of this rank: heads of values stay with the head of keys that they share.
        key_heads = even_share(spec.delta.key_heads, build.shards, "key heads of a delta net")
        value_heads = spec.delta.value_heads // build.shards.size
        self.sizes = msgspec.structs.replace(
            spec.delta, key_heads=key_heads, value_heads=value_heads
        )
        keys, values = spec.delta.keys, spec.delta.values
        parts = {"q": keys, "k": keys, "v": values, "z": values}
        self.inner = ColumnParallelLinear(build, spec.hidden, parts, bias=False)
        self.rates = ColumnParallelLinear(
            build, spec.hidden, dict.fromkeys("ba", spec.delta.value_heads), bias=False
        )
        own = 2 * self.sizes.keys + self.sizes.values
        self.conv_E1W = build.parameter(own, 1, self.sizes.kernel)
        self.decay_H = build.parameter(self.sizes.value_heads)  # logarithms
        self.dt_H = build.parameter(self.sizes.value_heads)
        self.norm_V = build.parameter(self.sizes.value_width)
        self.projection = RowParallelLinear(build, values, spec.hidden, bias=False)
        self.planes: tuple[Plane, ...] = MIXERS["delta"].shape.planes(spec, build.shards.size)

    def slots(self) -> Iterator[Slot]:
        start, kernel = 0, self.sizes.kernel
        for part, width in (
            ("q", self.sizes.keys),
            ("k", self.sizes.keys),
            ("v", self.sizes.values),
        ):
            index, whole = (slice(start, start + width),), width * self.shards.size
            name, shape = f"conv.{part}.weight", (whole, 1, kernel)
            yield Slot(name, "conv_E1W", shape, index, self._cut(width), "fan_in")
            start += width
        own = self.sizes.value_heads
        heads, cut = (own * self.shards.size,), self._cut(own)
        yield Slot("decay", "decay_H", heads, cut=cut, init="zeros")
        yield Slot("dt", "dt_H", heads, cut=cut, init="ones")
        yield Slot("norm.weight", "norm_V", (self.sizes.value_width,), init="ones")

    def _cut(self, own: int) -> tuple[int, int, int] | None:
        """This rank's rows, of so many on each."""
        first = own * self.shards.rank
        return (0, first, first + own) if self.shards.size > 1 else None

    def plain(self, x_TD: Tensor, step: ForwardStep) -> Tensor:
        q_TN, k_TN, v_TN, z_TN = self.inner(x_TD)
        b_TH, a_TH = self.rates(x_TD)
        beta_TH = b_TH.float().sigmoid()
        g_TH = -self.decay_H.float().exp() * F.softplus(a_TH.float() + self.dt_H.float())
        qkv_TE = torch.cat((q_TN, k_TN, v_TN), dim=-1)
        y_THV = recur(step.attend, self, (qkv_TE, g_TH, beta_TH))
        return self.projection(self._gated(y_THV.to(x_TD.dtype), z_TN))

    def several(self, inputs: Planes, state: Planes) -> tuple[Tensor, Planes]:
        qkv_SE, g_SH, beta_SH = inputs
        mixed_SE, before_WE = short_conv_reference(qkv_SE, state[0], self.conv_E1W[:, 0])
        y_SHV, found_HKV = delta_chunk_reference(
            *self._heads(mixed_SE), g_SH, beta_SH, self._by_head(state[1])
        )
        return y_SHV, (before_WE, found_HKV.flatten(0, 1))

    def single(self, inputs: Planes, states: Planes) -> tuple[Tensor, Planes]:
        qkv_BE, g_BH, beta_BH = inputs
        mixed_B1E, before_BWE = short_conv_reference(
            qkv_BE[:, None], states[0], self.conv_E1W[:, 0]
        )
        y_BHV, found_BHKV = delta_step_reference(
            *self._heads(mixed_B1E[:, 0]), g_BH, beta_BH, self._by_head(states[1])
        )
        return y_BHV, (before_BWE, found_BHKV.flatten(1, 2))

    @property
    def has_kernels(self) -> bool:
        sizes = self.sizes
        widths = sizes.key_width, sizes.value_width
        why_not = obstacle(sizes.key_heads, sizes.value_heads, *widths)
        return why_not is None

    def in_slots(self, inputs: Planes, planes: Planes, sequences: Sequences) -> Tensor:
        from cairn.kernels.delta.delta_chunk import delta_rule
        from cairn.kernels.delta.short_conv import short_conv

        qkv_TE, g_TH, beta_TH = inputs
        mixed_TE = short_conv(qkv_TE, self.conv_E1W[:, 0], planes[0], sequences, silu=True)
        sizes = self.sizes
        return delta_rule(
            DeltaCall(
                mixed_TE, g_TH, beta_TH, planes[1], sequences, sizes.key_heads, sizes.key_width
            )
        )

    def _heads(self, mixed_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of all heads, in float32; several heads of values share one of keys."""
        sizes = self.sizes
        activated_TE = F.silu(mixed_TE)
        parts = activated_TE.split((sizes.keys, sizes.keys, sizes.values), dim=-1)
        q_THK, k_THK = (
            unit_length(part.unflatten(-1, (sizes.key_heads, -1))).repeat_interleave(
                sizes.value_heads // sizes.key_heads, dim=-2
            )
            for part in parts[:2]
        )
        v_THV = parts[2].unflatten(-1, (sizes.value_heads, -1)).float()
        return q_THK * sizes.key_width**-0.5, k_THK, v_THV

    def _by_head(self, plane: Tensor) -> Tensor:
        return plane.unflatten(-2, (self.sizes.value_heads, self.sizes.key_width))

    def _gated(self, y_THV: Tensor, z_TN: Tensor) -> Tensor:
        """Each head normed, then times SiLU(z); the norm's weights are not offsets from one."""
        wide = y_THV.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed_TN = (self.shards.whole(self.norm_V) * wide.to(y_THV.dtype)).flatten(-2)
        return (normed_TN * F.silu(z_TN.float())).to(y_THV.dtype)
