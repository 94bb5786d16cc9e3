"""Adapter residency: the most recently used adapters are on the device, the others on the host.

    use({3, 7}) -> bring in 7, put out 2        an adapter of the step that comes is never put out

The policy is pure. `HostCopy` keeps an adapter's numbers on the host, so that putting it out moves nothing.
"""

from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from cairn.models.adapter.lora import LoRA


class Moves(NamedTuple):
    bring: list[int]
    put_out: list[int]


class Residency:
    """LRU policy with at most `most` adapters on the device; 0 for no limit."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self._there: dict[int, None] = {}  # used least recently first

    def use(self, numbers: Iterable[int]) -> Moves:
        """Copies to and from the device that a step with these adapters needs."""
        needed = dict.fromkeys(numbers)
        bring = [number for number in needed if number not in self._there]
        for number in needed:
            self._there.pop(number, None)
        rest = list(self._there)
        spare = len(rest) + len(needed) - self.most if self.most else 0
        put_out = rest[: max(0, spare)]
        self._there = dict.fromkeys([*rest[len(put_out) :], *needed])
        return Moves(bring, put_out)

    def forget(self, number: int) -> None:
        self._there.pop(number, None)

    def __contains__(self, number: int) -> bool:
        return number in self._there


class HostCopy:
    """The parameters of an adapter on the host, and those on the device while they are there."""

    def __init__(self, loras: Iterable[LoRA], flat: Tensor | None = None) -> None:
        """`flat`: what all of them are parts of, so that one copy moves them."""
        parameters = [parameter for lora in loras for parameter in lora.parameters()]
        if flat is None:
            flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
            begins = [0, *accumulate(parameter.numel() for parameter in parameters)]
        else:
            first, size = flat.data_ptr(), flat.element_size()
            begins = [(parameter.data_ptr() - first) // size for parameter in parameters]
        self._parts = list(zip(parameters, begins, strict=False))
        self._host = torch.empty_like(flat, device="cpu", pin_memory=flat.is_cuda)
        self._host.copy_(flat)

    def put_out(self) -> None:
        """The device's memory is free for work that is launched from now on."""
        self._point_into(self._host)

    def bring(self, device: torch.device) -> None:
        self._point_into(self._host.to(device, non_blocking=True, copy=True))

    def _point_into(self, flat: Tensor) -> None:
        for parameter, begin in self._parts:
            parameter.data = flat[begin : begin + parameter.numel()].view(parameter.shape)
