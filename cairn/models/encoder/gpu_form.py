"""The fast form of packed texts and patches on a GPU, without gradients: the same layers through our kernels.

    add + norm | q, k, v | rotate | attend | out | add + norm | up, GELU | down

A `ForwardStep` of `layer_loop`, as `models.fused` has one for decoders: there keys are written into pages, here whole
texts or pictures lie side by side and `attend` takes them as they are.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from cairn.kernels.layer.rope import rope
from cairn.kernels.norm.layernorm import add_layernorm
from cairn.models.activation import Gate
from cairn.models.attend import Attend
from cairn.models.attention import Attention
from cairn.models.fused import heads_of
from cairn.models.layer_loop import ForwardStep, PlainResidual, Sublayer
from cairn.models.linear.form import Epilogue, Kernels, Product
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.rope import Rotation
from cairn.models.spec import ModelSpec, Rope

if TYPE_CHECKING:
    from cairn.models.encoder.model import EncoderLayer

KERNELS = Kernels()


class Entered(NamedTuple):
    """Input of a sublayer whose output is not added to the residual immediately."""

    tensor: Tensor
    onto: Tensor | None = None

    def add(self, y: Any) -> PlainResidual:
        return PlainResidual(self.tensor + y)


class PackedStep:
    """A pass with fused kernels. `rotations` contains the rotation of each token for each RoPE."""

    fuses = True

    def __init__(self, attend: Attend, spec: ModelSpec, rotations: dict[Rope, Rotation]) -> None:
        self.attend, self.spec, self.rotations = attend, spec, rotations
        self.tables = {kind: table_of(rotation) for kind, rotation in rotations.items()}

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
    ) -> Tensor:
        return cast(Tensor, part.product(x.tensor, Epilogue(gate, None, KERNELS)))

    def rows(self, part: RowParallelLinear, x: Tensor, onto: Tensor | None) -> Product:
        return part.product(x, Epilogue(None, onto, KERNELS))

    def experts(self, part: Any, x: Any) -> Product:
        return part.plain(x.tensor, self)

    def attended(self, mixer: Attention, qkv_TE: Tensor) -> Tensor:
        heads, table = heads_of(mixer, self.spec), self.tables.get(cast(Rope, mixer.rope))
        if table is None and heads.q_weight is None:  # nothing to do but to look at them apart
            packed = qkv_TE.unflatten(-1, (heads.q + 2 * heads.kv, -1))
            q_THC, k_TKC, v_TKC = packed.split([heads.q, heads.kv, heads.kv], dim=1)
        else:
            q_THC, k_TKC, v_TKC = rope(qkv_TE, heads, table)
        return self.attend(q_THC, k_TKC, v_TKC, mixer.rule).flatten(-2)


def table_of(rotation: Rotation) -> Tensor:
    """A row for each token, [T, C]: cosines of all pairs, then their sines."""
    pairs = rotation.cos_T1C.shape[-1] // 2
    halves = (rotation.cos_T1C[:, 0, :pairs], rotation.sin_T1C[:, 0, :pairs])
    return torch.cat(halves, dim=-1)


def fused_layer(layer: "EncoderLayer", x_TD: Tensor, step: ForwardStep) -> Tensor:
    """Post-norm layer: norms are fused with the preceding residual additions."""

    def computed(part: Sublayer, x_TD: Tensor) -> Tensor:
        return cast(Tensor, part.fused(Entered(x_TD), step))

    def normed(part: Sublayer, x_TD: Tensor, norm: Any) -> Tensor:
        y_TD = computed(part, x_TD)
        return add_layernorm(y_TD, x_TD, norm.weight, norm.bias, norm.eps, out=y_TD)

    if layer.is_post:
        x_TD = normed(layer.attention, x_TD, layer.attention_norm)
        return normed(layer.feed_forward, x_TD, layer.feed_forward_norm)
    entered_TD = x_TD if layer.attention_norm is None else layer.attention_norm(x_TD)
    x_TD = x_TD + computed(layer.attention, entered_TD)
    return x_TD + computed(layer.feed_forward, layer.feed_forward_norm(x_TD))
