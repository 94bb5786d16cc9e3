"""State slots of recurrent layers: one for each running request, and one for each snapshot.

    planes    [layer, slot, heads, width] of each plane of a state; slots are numbered behind the pages
    step      restores: snapshot -> slot of a request that goes on from there
              a request that begins has an empty state
              ... the layers of the step advance the states of its chunks ...
              saves: slot -> snapshot, where a chunk ended at an anchor

Who holds which slot is for the block manager. On a GPU the slots of a step are put where its kernels, or the graph that
holds them, find them (`stage`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cairn.models.cache import CacheGroup
from cairn.models.recurrence import Planes, Recurrence, plane_type
from cairn.serve.engine.step import Chunk, Step

TURNS = 4  # pinned arrays: more than there are steps in flight
PADDING_SLOT = -1  # the slot of padding


class StateSlots:
    def __init__(
        self,
        groups: Sequence[CacheGroup],
        slots: int,
        first: int,
        dtype: torch.dtype,
        device: torch.device | str,
        most: int = 0,
    ) -> None:
        """`first`: the number of the first slot; `dtype`: of planes without a type of their own.

        `most`: sequences that a staged step may have, with padding.
        """
        self.first, self.device = first, torch.device(device)
        self.groups = tuple(groups)
        self.planes: list[Planes] = [
            tuple(
                torch.zeros(
                    len(group.layers),
                    slots,
                    plane.heads,
                    plane.width,
                    dtype=plane_type(plane, dtype),
                    device=device,
                )
                for plane in group.planes
            )
            for group in groups
        ]
        self._places = {
            layer: (index, place)
            for index, group in enumerate(groups)
            for place, layer in enumerate(group.layers)
        }
        # For kernels: of each group, the slots of the step's sequences; -1 behind them.
        on_gpu = self.device.type == "cuda"
        self._host = [
            torch.full((len(groups), most), PADDING_SLOT, dtype=torch.int32, pin_memory=on_gpu)
            for _ in range(TURNS)
        ]
        self._turn = 0
        self.slots_GB = self._host[0].to(self.device, copy=True)
        self.counts: list[int] = []  # tokens of each sequence of the step
        self.slots: list[list[int]] = []  # of each sequence, its slot in every group

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for planes in self.planes for plane in planes)

    def begin(self, step: Step) -> None:
        """Restore snapshots before a step, in allocation order, then clear the slots of new requests."""
        self._copy(step.restores)
        self.set_sequences(step.chunks)
        for chunk, slots in zip(step.chunks, self.slots, strict=True):
            if chunk.start == 0:
                for planes, slot in zip(self.planes, slots, strict=True):
                    for plane in planes:
                        plane[:, slot].zero_()

    def set_sequences(self, chunks: Sequence[Chunk]) -> None:
        self.counts = [chunk.count for chunk in chunks]
        self.slots = [self._slots_of(chunk) for chunk in chunks]

    def _slots_of(self, chunk: Chunk) -> list[int]:
        return [page - self.first for page in chunk.request.states]

    def stage(self, chunks: Sequence[Chunk]) -> None:
        """Put the slots of these chunks on the device; sequences behind them are padding."""
        self._turn = (self._turn + 1) % TURNS
        host_GB = self._host[self._turn].fill_(PADDING_SLOT)
        if chunks:
            slots_BG = [self._slots_of(chunk) for chunk in chunks]
            host_GB[:, : len(chunks)] = torch.tensor(slots_BG, dtype=torch.int32).T
        self.slots_GB.copy_(host_GB, non_blocking=True)

    def end(self, step: Step) -> None:
        """Take the snapshots of a step after it."""
        self._copy(step.saves)

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """A block manager lists the slots of all groups one after another, from and to."""
        for at, (source, target) in enumerate(copies):
            for plane in self.planes[at % len(self.groups)]:
                plane[:, target - self.first] = plane[:, source - self.first]

    def of_layer(self, layer: int) -> tuple[int, Planes]:
        """The group of a layer, and its states in all slots."""
        group, place = self._places[layer]
        return group, tuple(plane[place] for plane in self.planes[group])

    def recur(self, rule: Recurrence, inputs: Planes) -> Tensor:
        """Sequences with one token all at once, the others one after another."""
        group, planes = self.of_layer(rule.layer)
        single, several, start = [], [], 0
        for count, slots in zip(self.counts, self.slots, strict=True):
            (single if count == 1 else several).append((slice(start, start + count), slots[group]))
            start += count
        outputs: list[tuple[Tensor | slice, Tensor]] = []
        if single:
            at_B = torch.tensor([tokens.start for tokens, _ in single], device=self.device)
            slots_B = torch.tensor([slot for _, slot in single], device=self.device)
            outputs.append(
                (at_B, step_states(rule, tuple(x[at_B] for x in inputs), planes, slots_B))
            )
        for tokens, slot in several:
            before = tuple(plane[slot] for plane in planes)
            y, state = rule.several(tuple(x[tokens] for x in inputs), before)
            for plane, new in zip(planes, state, strict=True):
                plane[slot] = new
            outputs.append((tokens, y))
        out = outputs[0][1].new_zeros(len(inputs[0]), *outputs[0][1].shape[1:])
        for at, y in outputs:
            out[at] = y
        return out


def step_states(rule: Recurrence, inputs: Planes, planes: Planes, slots_B: Tensor) -> Tensor:
    """Advance the states of these slots by one token, in place."""
    y, states = rule.single(inputs, tuple(plane[slots_B] for plane in planes))
    for plane, new in zip(planes, states, strict=True):
        plane[slots_B] = new.to(plane.dtype)
    return y
