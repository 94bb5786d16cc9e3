"""A low-rank adapter of one linear map: what its addend computes.

    LoRA   s B A x                                       A [r, K], B [N, r]
    DoRA   (m/|W + sBA| - 1) W x + m/|W + sBA| s B A x   m [N]; the norm of each row has no gradient

A map of several parts (q, k, v) has one matrix A with the rows of all parts, so that one product shrinks x for all of
them, and a B for each part. Under tensor parallelism B is cut as the rows of a `ColumnParallelLinear`, A as the columns
of a `RowParallelLinear`; the other one is whole on each rank and its gradients are summed (`Shards.whole`).
"""

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.models.build import ModelBuild, Slot, SlotModule
from cairn.models.cpu_half_precision import linear
from cairn.models.linear.form import Epilogue
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear, Vocabulary


class LoRAPart(NamedTuple):
    """A part of a `ColumnParallelLinear` map, or the whole map."""

    name: str  # "q", or "" for the only one
    rows: int  # on this rank
    total: int  # of all ranks
    rank: int  # 0: this part has no adapter
    scale: float


class LoRA(SlotModule):
    """The adapter of one linear map; `attach` puts it there."""

    def __init__(self, build: ModelBuild, home: Linear, parts: list[LoRAPart], dora: bool) -> None:
        super().__init__()
        self.home = (home,)  # in a tuple: it is not a module inside this one
        self.parts, self.dora, self.enabled = parts, dora, True
        self.gain_N: Tensor | None = None  # of a DoRA adapter that is trained no further
        self.shards = build.shards
        width = home.shape_NK()[1]
        self.a_RK = build.parameter(sum(part.rank for part in parts), width)
        for part in parts:
            if part.rank:
                self.register_parameter(_key("b", part), build.parameter(part.rows, part.rank))
                if dora:
                    self.register_parameter(_key("m", part), build.parameter(part.rows))

    def forward(self, x_MK: Tensor) -> Tensor:
        """Return the addend of the adapter to the output of its map."""
        if not self.enabled:
            return x_MK.new_zeros(len(x_MK), sum(part.rows for part in self.parts))
        columns = isinstance(self.home[0], ColumnParallelLinear | Vocabulary)
        a_RK = self.shards.whole(self.a_RK) if columns else self.a_RK
        h_MR = linear(x_MK.to(a_RK.dtype), a_RK)
        out_MN = torch.cat([self._grown(part, h, columns) for part, h in self._split(h_MR)], -1)
        out_MN = self._with_magnitudes(x_MK, out_MN) if self.dora else out_MN
        return out_MN.to(x_MK.dtype)

    def delta(self, part: LoRAPart) -> Tensor:
        """scale * B A of a part, float32, as stored on this rank."""
        start = sum(other.rank for other in self.parts[: self.parts.index(part)])
        a_RK = self.a_RK.detach()[start : start + part.rank].float()
        return part.scale * (self.b_of(part).detach().float() @ a_RK)

    def b_of(self, part: LoRAPart) -> Tensor:
        return cast(Tensor, getattr(self, _key("b", part)))

    def magnitude(self, part: LoRAPart) -> Tensor:
        return cast(Tensor, getattr(self, _key("m", part)))

    def _split(self, h_MR: Tensor) -> Iterator[tuple[LoRAPart, Tensor]]:
        start = 0
        for part in self.parts:
            yield part, h_MR[:, start : start + part.rank]
            start += part.rank

    def _grown(self, part: LoRAPart, h_Mr: Tensor, columns: bool) -> Tensor:
        if not part.rank:
            return h_Mr.new_zeros(len(h_Mr), part.rows)
        b_Nr = self.b_of(part)
        return part.scale * linear(h_Mr, b_Nr if columns else self.shards.whole(b_Nr))

    def _with_magnitudes(self, x_MK: Tensor, lora_MN: Tensor) -> Tensor:
        home = self.home[0]
        base_MN = cast(Tensor, home._multiply(x_MK, Epilogue(), biased=False))
        gain_N = self._gains() if self.gain_N is None else self.gain_N
        return (gain_N - 1) * base_MN + gain_N * lora_MN

    @torch.no_grad()
    def settle(self) -> None:
        """Training is over: what depends on the weights alone is computed once."""
        self.requires_grad_(False)
        self.gain_N = self._gains() if self.dora else None

    def _gains(self) -> Tensor:
        return torch.cat([self._gain(part, weight) for part, weight in self._weights()])

    def _gain(self, part: LoRAPart, weight_NK: Tensor) -> Tensor:
        """m / |W + sBA| of each row; 1 where the part has no adapter."""
        if not part.rank:
            return weight_NK.new_ones(part.rows)
        norm_N = (weight_NK.detach().float() + self.delta(part)).norm(dim=1)
        return self.magnitude(part) / norm_N.to(weight_NK.dtype)

    def _weights(self) -> Iterator[tuple[LoRAPart, Tensor]]:
        """The weights of each part, whether they lie in one matrix or in several."""
        rows_NK = torch.cat([weight.detach() for weight in self.home[0].matrices()])
        start = 0
        for part in self.parts:
            yield part, rows_NK[start : start + part.rows]
            start += part.rows

    def at(self, home: Linear) -> "LoRA":
        """The adapter of another map of the same shape, with the same parameters."""
        copy = LoRA.__new__(LoRA)
        copy.__dict__.update(self.__dict__, home=(home,))
        return copy

    def with_parameters(self, values: dict[str, Tensor]) -> "LoRA":
        """The same adapter with other numbers, which are not trained: plain tensors take less time to make."""
        copy = LoRA.__new__(LoRA)
        copy.__dict__.update(self.__dict__, _parameters=values)
        return copy

    @torch.no_grad()
    def init_magnitudes(self) -> None:
        """Magnitudes of a new DoRA adapter: the length of each row, so that nothing changes at first."""
        if self.dora:
            for part, weight_NK in self._weights():
                if part.rank:
                    self.magnitude(part).copy_(weight_NK.float().norm(dim=1))

    def slots(self) -> Iterator[Slot]:
        width = self._whole_width()
        local = self.a_RK.shape[1]
        first = local * self.shards.rank
        cut_a = (1, first, first + local) if local != width else None
        start = 0
        for part in self.parts:
            if not part.rank:
                continue
            prefix = f"{part.name}." if part.name else ""
            index = (slice(start, start + part.rank),)
            yield Slot(f"{prefix}a", "a_RK", (part.rank, width), index, cut_a, "fan_in")
            cut = None
            if part.rows != part.total:
                cut = (0, part.rows * self.shards.rank, part.rows * (self.shards.rank + 1))
            yield Slot(
                f"{prefix}b", _key("b", part), (part.total, part.rank), cut=cut, init="zeros"
            )
            if self.dora:
                yield Slot(f"{prefix}m", _key("m", part), (part.total,), cut=cut, init="ones")
            start += part.rank

    def _whole_width(self) -> int:
        home = self.home[0]
        return home.shape[1] if isinstance(home, RowParallelLinear) else self.a_RK.shape[1]


class EmbeddingLoRA(SlotModule):
    """The adapter of a lookup: s B a[token], with A stored as [r, V]."""

    def __init__(self, build: ModelBuild, vocab: int, width: int, rank: int, scale: float) -> None:
        super().__init__()
        self.scale, self.enabled = scale, True
        self.a_rV, self.b_Dr = build.parameter(rank, vocab), build.parameter(width, rank)

    def forward(self, tokens_T: Tensor) -> Tensor:
        h_Tr = F.embedding(tokens_T, self.a_rV.t())
        added_TD = self.scale * linear(h_Tr, self.b_Dr)
        return added_TD if self.enabled else torch.zeros_like(added_TD)

    def slots(self) -> Iterator[Slot]:
        # PEFT begins with A = 0 and B drawn, here; the product is 0 either way.
        yield Slot("a", "a_rV", tuple(self.a_rV.shape), init="zeros")
        yield Slot("b", "b_Dr", tuple(self.b_Dr.shape))


def _key(kind: str, part: LoRAPart) -> str:
    return f"{kind}_{part.name}" if part.name else kind


def adapters(model: nn.Module) -> Iterator[LoRA | EmbeddingLoRA]:
    for module in model.modules():
        if isinstance(module, LoRA | EmbeddingLoRA):
            yield module


def adapter_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for one in adapters(model):
        yield from one.parameters()
