"""Room for adapters' matrices A behind the weights of their maps, so that one product computes W x and A x.

    weight of a map    | W  [N, K]            |     y = x W'           as before
    rows behind it     | A of position 0      |     A x of each position, as further columns of the same product
                       | A of position 1 ...  |

On a GPU a product of more than 64 rows is cuBLAS's, and a kernel of ours behind it cannot start while it runs:
shrinking x there takes longer than the few tiles of columns that the wider product has. An adapter is copied to a
position when a step first needs it there. The room is made before the memory for pages is counted.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cairn.core.units import format_bytes
from cairn.models.adapter.lora import LoRA
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear
from cairn.models.transformer import Transformer

RANK = 16  # that a position has room for in each part of a map


class Move(NamedTuple):
    slot: int
    position: int


class Positions:
    """Assignment of adapter slots to positions. Pure."""

    def __init__(self, count: int) -> None:
        self._slots = [0] * count  # 0: the position is free
        self._used = [0] * count  # the step that used it last
        self._step = 0

    def place(self, slots: Iterable[int], among: int) -> list[Move]:
        """Gives each slot one of the first `among` positions: those that it has now, then free ones, then old ones."""
        needed, self._step = set(slots), self._step + 1
        there = {slot: at for at, slot in enumerate(self._slots[:among]) if slot in needed}
        order = sorted(range(among), key=lambda at: (self._slots[at] > 0, self._used[at], at))
        others = iter([at for at in order if self._slots[at] not in needed])
        moves = [Move(slot, next(others)) for slot in sorted(needed - there.keys())]
        for move in moves:
            self.drop(move.slot)  # from a position that this step does not multiply with
            self._slots[move.position] = move.slot
        for at in (*there.values(), *(move.position for move in moves)):
            self._used[at] = self._step
        return moves

    def drop(self, slot: int) -> None:
        self._slots = [0 if other == slot else other for other in self._slots]

    def by_slot(self) -> dict[int, int]:
        return {slot: at for at, slot in enumerate(self._slots) if slot}


class AdapterColumns:
    def __init__(self, model: Transformer, count: int, rank: int = RANK) -> None:
        """Room for `count` adapters of a rank of up to `rank` behind every weight that is one matrix of floats."""
        self.count, self.positions = count, Positions(count)
        self.room: dict[Linear, int] = {}  # rows of a position
        self._wide: dict[Linear, Tensor] = {}  # weight and room, in one piece
        for home in model.modules():
            if (
                isinstance(home, ColumnParallelLinear | RowParallelLinear)
                and (owner := _owner(home)) is not None
            ):
                parts = len(home.rows) if isinstance(home, ColumnParallelLinear) else 1
                self.room[home] = rank * parts
                self._wide[home] = _widened(owner, count * rank * parts)

    @property
    def nbytes(self) -> int:
        sizes = ((wide, self.count * self.room[home]) for home, wide in self._wide.items())
        return sum(rows * wide.stride(0) * wide.element_size() for wide, rows in sizes)

    def note(self) -> str:
        return (
            f"{format_bytes(self.nbytes)} behind the weights for {self.count} adapters: steps of many requests "
            "multiply with both at once"
        )

    def matrix(self, home: Linear, among: int, rank: int) -> Tensor | None:
        """The weight and the first `among` positions behind it; None: without room for such a rank."""
        if self.room.get(home, 0) < rank:
            return None
        return self._wide[home][: home.shape_NK()[0] + among * self.room[home]]

    def place(self, adapters: Mapping[int, Mapping[Linear, LoRA]], among: int) -> dict[int, int]:
        """Copies the adapters of a step, by slot, to positions; returns all positions by slot."""
        into: list[Tensor] = []
        matrices: list[Tensor] = []
        for slot, position in self.positions.place(adapters, among):
            for home, lora in adapters[slot].items():
                rank, room = len(lora.a_RK), self.room.get(home, 0)
                if rank <= room:
                    start = home.shape_NK()[0] + position * room
                    into.append(self._wide[home][start : start + rank])
                    matrices.append(lora.a_RK.detach())
        if into:
            with torch.inference_mode():
                torch._foreach_copy_(into, matrices, non_blocking=True)
        return self.positions.by_slot()


def _owner(home: ColumnParallelLinear | RowParallelLinear) -> nn.Module | None:
    """Module with the single float matrix of a linear map; None for other weight formats or with a bias."""
    owners = home.owners()
    if home.form is not None or len(owners) > 1 or getattr(owners[0], "bias", None) is not None:
        return None
    return owners[0]


def _widened(owner: nn.Module, rows: int) -> Tensor:
    """The weight moves to memory with so many rows behind it; the parameter stays, and its old memory is given back."""
    weight = owner.get_parameter("weight")
    wide = weight.new_empty(len(weight) + rows, weight.shape[1])
    with torch.no_grad():
        wide[: len(weight)].copy_(weight)
    weight.data = wide[: len(weight)]
    if weight.is_cuda:
        torch.cuda.empty_cache()
    return wide.detach()
