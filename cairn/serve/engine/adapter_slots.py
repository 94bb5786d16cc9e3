"""Adapters on a GPU in slots that captured steps read: loading one, or another mix of them in a step, changes no graph.

    adapter -> slot: addresses, ranks and scales of every map in one table on the device
    step    -> rows sorted by slot, in tiles: one small copy, and none while the same requests decode

`kernels.adapter.lora` adds what the slot of each row adds, in place. An adapter that no slot can hold (DoRA, split over
ranks, or one too many) is computed without graphs, as on a CPU (`engine.adapters`). With room behind the weights
(`engine.adapter_columns`) captured steps of many rows get A x from the product of the base.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from cairn.kernels.adapter.lora import lora_add, lora_add_beside, lora_swiglu, lora_swiglu_beside
from cairn.kernels.adapter.slots import EMPTY, entry_of, is_aligned, most_tiles, tiles_of
from cairn.kernels.adapter.table import (
    ENTRY,
    FEW_TOKENS,
    PARTS,
    TILE,
    LoraTable,
    Tiles,
    Widest,
)
from cairn.models.adapter.lora import LoRA
from cairn.models.linear.maps import ColumnParallelLinear, Linear, RowParallelLinear
from cairn.models.transformer import Transformer
from cairn.serve.engine.adapter_columns import AdapterColumns
from cairn.serve.engine.batch import TURNS
from cairn.serve.engine.request import Limits
from cairn.serve.engine.step import Chunk

SLOTS = 512  # slot 0 is the model itself
# Adapters that a captured step has tiles for: the fewer, the less of its grid is idle. More run kernel by kernel.
BUCKETS = (1, 8, 32, 64)
# Rows from which a product is cuBLAS's: with fewer, the kernel that shrinks x starts while the product still runs.
MANY_ROWS = 65


def bucket_of(adapters: int) -> int | None:
    """The kind of captured step that has tiles enough for so many adapters."""
    return next((most for most in BUCKETS if adapters <= most), None)


class AdapterSlots:
    def __init__(self, model: Transformer, limits: Limits) -> None:
        self.device = model.embedding.weight.device
        self.maps = [
            part
            for part in model.modules()
            if isinstance(part, ColumnParallelLinear | RowParallelLinear)
        ]
        shape = (SLOTS, len(self.maps))
        self.table = LoraTable(
            torch.zeros(*shape, ENTRY, dtype=torch.int64, device=self.device),
            torch.zeros(*shape, PARTS, device=self.device),
        )
        self.addends: dict[Linear, SlotAddend] = {}  # of all maps that some adapter covers
        # How often a step with adapters has become another one: graphs of before are void.
        self.layouts = 0
        self.columns: AdapterColumns | None = None  # room for A behind the weights
        self._slots: dict[int, int] = {}  # by the number of the adapter
        self._held: dict[int, Mapping[Linear, LoRA]] = {}  # by slot
        self._unaligned = False  # some adapter could not be read 16 bytes at a time
        self._free = list(range(SLOTS - 1, 0, -1))
        self._rows = 2 * limits.step_tokens
        room = self._rows + TILE * most_tiles(self._rows, SLOTS)
        pinned = self.device.type == "cuda"
        self._host = [torch.zeros(room, dtype=torch.int32, pin_memory=pinned) for _ in range(TURNS)]
        self._words = torch.zeros(room, dtype=torch.int32, device=self.device)
        self._turn = 0
        self._staged: tuple[object, ...] = ()
        self._tiles: Tiles | None = None  # of the step that is launched next

    def put(self, number: int, addends: Mapping[Linear, LoRA]) -> bool:
        """Gives an adapter a slot. False: it has none, and steps with it run kernel by kernel."""
        if not self._free or not all(map(_fits, addends.values())):
            return False
        slot = self._slots[number] = self._free.pop()
        self._held[slot] = addends
        entries, scales = [[0] * ENTRY] * len(self.maps), [[0.0] * PARTS] * len(self.maps)
        aligned = True
        for at, home in enumerate(self.maps):
            if (lora := addends.get(home)) is None:
                continue
            parts = [(lora.b_of(part) if part.rank else None, part.scale) for part in lora.parts]
            entries[at], scales[at] = entry_of(lora.a_RK, parts)
            aligned = aligned and is_aligned(lora.a_RK, parts, [part.rows for part in lora.parts])
            self._cover(home, at, Widest(len(lora.a_RK), max(part.rank for part in lora.parts)))
        for there, here in (
            (self.table.entries_SME, torch.tensor(entries)),
            (self.table.scales_SMP, torch.tensor(scales)),
        ):
            there[slot].copy_(_pinned(here, self.device), non_blocking=True)
        if not aligned and not self._unaligned:
            # All reads stay narrow from now on: graphs are void once, not whenever such an adapter comes or goes.
            self._unaligned = True
            self.layouts += 1
            self._staged = ()
        return True

    def _cover(self, home: Linear, at: int, ranks: Widest) -> None:
        """Steps with adapters compute this map for ranks as large as these."""
        before = self.addends[home].widest if home in self.addends else Widest(0, 0)
        widest = Widest(*map(max, before, ranks))
        if home not in self.addends or widest != before:
            self.addends[home] = SlotAddend(self, home, at, widest)
            self.layouts += 1

    def drop(self, number: int) -> None:
        """The slot is free for another adapter; steps in flight have read it by the time that one is copied."""
        if (slot := self._slots.pop(number, None)) is not None:
            self._free.append(slot)
            self._staged = ()
            del self._held[slot]
            if self.columns is not None:
                self.columns.positions.drop(slot)

    def hold(self, numbers: Iterable[int]) -> bool:
        return all(number in self._slots for number in numbers)

    def stage(self, chunks: Sequence[Chunk], tokens: int | None = None, most: int = 0) -> None:
        """Sends which rows are whose. `tokens`: of a captured step, which has tiles for any `most` adapters."""
        runs = tuple((self._slots.get(chunk.request.adapter, 0), chunk.count) for chunk in chunks)
        if self._staged == (runs, tokens, most):
            return
        slots = [slot for slot, count in runs for _ in range(count)]
        total = len(slots) if tokens is None else tokens
        positions = self._place(set(slots) - {0}, tokens, most)
        rows, tiles, block = tiles_of(slots + [0] * (total - len(slots)), 0, positions)
        room = len(tiles) if tokens is None else most_tiles(tokens, most + 1)
        tiles += [EMPTY] * (room - len(tiles))
        self._turn = (self._turn + 1) % TURNS
        host, end = self._host[self._turn], self._rows + TILE * room
        host[:total] = torch.tensor(rows, dtype=torch.int32)
        host[self._rows : end] = torch.tensor(tiles, dtype=torch.int32).flatten()
        self._words[:total].copy_(host[:total], non_blocking=True)
        self._words[self._rows : end].copy_(host[self._rows : end], non_blocking=True)
        words_N4 = self._words[self._rows : end].view(room, TILE)
        among = 0 if positions is None else most
        self._tiles = Tiles(self._words[:total], words_N4, block, not self._unaligned, among)
        self._staged = (runs, tokens, most)

    def _place(self, slots: Iterable[int], tokens: int | None, most: int) -> dict[int, int] | None:
        """Positions by slot, where the products of such a captured step have columns for A; else None."""
        columns = self.columns
        if columns is None or tokens is None or not 0 < most <= columns.count:
            return None
        if not MANY_ROWS <= tokens <= FEW_TOKENS:
            return None
        return columns.place({slot: self._held[slot] for slot in slots}, most)

    def staged(self) -> Tiles:
        if self._tiles is None:
            raise RuntimeError("stage the step before it is launched")
        return self._tiles


class SlotAddend:
    """Addend of the adapters of a step's rows to one linear map."""

    def __init__(self, slots: AdapterSlots, home: Linear, number: int, widest: Widest) -> None:
        self.slots, self.home, self.number, self.widest = slots, home, number, widest
        self.part_rows = (
            list(home.rows.values())
            if isinstance(home, ColumnParallelLinear)
            else [home.shape_NK()[0]]
        )

    def __call__(self, x_MK: Tensor) -> Tensor:
        return self.onto(x_MK.new_zeros(len(x_MK), sum(self.part_rows)), x_MK)

    def whole(self, x_MK: Tensor, gated: bool) -> Tensor | None:
        slots, tiles = self.slots, self.slots.staged()
        if slots.columns is None or not tiles.positions:
            return None
        wide_NK = slots.columns.matrix(self.home, tiles.positions, self.widest.together)
        if wide_NK is None:
            return None
        wide_MN, how = F.linear(x_MK, wide_NK), (tiles, self.widest)
        if gated:
            return lora_swiglu_beside(wide_MN, slots.table, self.number, self.part_rows[0], *how)
        return lora_add_beside(wide_MN, slots.table, self.number, self.part_rows, *how)

    def onto(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        table, tiles = self.slots.table, self.slots.staged()
        return lora_add(y_MN, x_MK, table, self.number, self.part_rows, tiles, self.widest)

    def gated(self, y_MN: Tensor, x_MK: Tensor) -> Tensor:
        table, tiles = self.slots.table, self.slots.staged()
        return lora_swiglu(y_MN, x_MK, table, self.number, tiles, self.widest)


def _fits(lora: LoRA) -> bool:
    return not lora.dora and lora.shards.size == 1 and len(lora.parts) <= PARTS


def _pinned(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor
