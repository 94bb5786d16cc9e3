"""The matrices of one layer that can be made smaller, and which tensors of a checkpoint each of them holds.

    attention.qkv [q; k; v]    attention.out    feed_forward.inner [gate; up]    feed_forward.down    experts, each

Maps of one input are one matrix: they see the same statistics and are rounded in one pass. The router, the embedding
and the output head are left as they are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cairn.core.errors import UnsupportedModel
from cairn.models.attention import Attention
from cairn.models.experts import ExpertLayer
from cairn.models.layers import FeedForward
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear


@dataclass(frozen=True)
class NamedMatrix:
    """A matrix [N, K] and the slots that contain its values."""

    name: str  # layers.0.attention.qkv
    slots: tuple[str, ...]  # tensors that its rows are, in order
    rows: tuple[int, ...]  # of each slot
    owner: nn.Module  # a linear map, or an expert layer
    parameter: str = ""  # of an expert layer: inner_EFD or down_EDF
    expert: int = 0

    @property
    def linear(self) -> Linear | None:
        return self.owner if isinstance(self.owner, Linear) else None

    def read(self) -> Tensor:
        """A copy of the values."""
        if self.linear is not None:
            return self.linear.joined().clone()
        return getattr(self.owner, self.parameter).detach()[self.expert].clone()

    def write(self, w_NK: Tensor) -> None:
        """Other values; what the parameters were made of, such as a mapped file, is not touched."""
        if self.linear is None:
            getattr(self.owner, self.parameter).data[self.expert].copy_(w_NK)
            return
        owners = self.linear.owners()
        rows = [cast(Tensor, owner.weight).shape[0] for owner in owners]
        for owner, part in zip(owners, w_NK.split(rows), strict=True):
            dtype = cast(Tensor, owner.weight).dtype
            owner.weight = nn.Parameter(part.to(dtype).contiguous(), requires_grad=False)


def matrices_of(layer: Any, number: int) -> list[NamedMatrix]:
    """Matrices of a layer in execution order."""
    prefix = f"layers.{number}"
    if not isinstance(layer.attention, Attention):
        raise UnsupportedModel(
            f"layer {number} is a {type(layer.attention).__name__}, and only attention with keys and values of its "
            "own can be quantised or pruned here",
            hint="take another model, or quantise as it is served: --weights",
        )
    found = [
        _linear(layer.attention.qkv, f"{prefix}.attention.qkv"),
        _linear(layer.attention.out, f"{prefix}.attention.out"),
    ]
    feed = layer.feed_forward
    if isinstance(feed, FeedForward):
        return [*found, *_dense(feed, f"{prefix}.feed_forward")]
    found += list(_experts(feed, f"{prefix}.feed_forward"))
    if feed.shared is not None:
        found += _dense(feed.shared, f"{prefix}.feed_forward.shared")
    return found


def _dense(feed: FeedForward, path: str) -> list[NamedMatrix]:
    return [_linear(feed.inner, f"{path}.inner"), _linear(feed.down, f"{path}.down")]


def _linear(part: ColumnParallelLinear | RowParallelLinear, path: str) -> NamedMatrix:
    if isinstance(part, RowParallelLinear):
        return NamedMatrix(path, (f"{path}.weight",), (part.shape[0],), part)
    slots = tuple(f"{path}.{name}.weight" for name in part.rows)
    return NamedMatrix(path, slots, tuple(part.rows.values()), part)


def _experts(feed: ExpertLayer, path: str) -> Iterator[NamedMatrix]:
    for expert in range(feed.experts.count):
        slots = tuple(f"{path}.{expert}.{part}.weight" for part in feed.parts)
        rows = (feed.width,) * len(feed.parts)
        yield NamedMatrix(f"{path}.{expert}.inner", slots, rows, feed, "inner_EFD", expert)
        slot = f"{path}.{expert}.down.weight"
        yield NamedMatrix(
            f"{path}.{expert}.down", (slot,), (feed.hidden,), feed, "down_EDF", expert
        )


def writable_experts(layer: Any) -> None:
    """Parameters of experts that are views of a mapped file become copies, once."""
    feed = layer.feed_forward
    if isinstance(feed, ExpertLayer):
        for name in ("inner_EFD", "down_EDF"):
            value = getattr(feed, name).detach().clone(memory_format=torch.contiguous_format)
            setattr(feed, name, nn.Parameter(value, requires_grad=False))
