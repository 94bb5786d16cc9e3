"""How much energy a GPU has taken, by the counter of the card itself: joules since the driver was loaded.

`EnergyCounter.joules` is the sum over the cards it was made for. A card without a counter is integrated from its power
on every call. Without NVML there is nothing to read, and None is the answer.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from cairn.hw.nvml import Nvml, NvmlMissing, open_nvml

MILLI = 1e-3


class EnergyCounter:
    def __init__(
        self, nvml: Nvml, cards: Sequence[int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._clock = nvml, clock
        handles = [nvml.ask("nvmlDeviceGetHandleByIndex", card) for card in cards]
        self._handles = [handle for handle in handles if handle is not None]
        self._integrated = dict.fromkeys(range(len(self._handles)), 0.0)
        self._asked = clock()

    def joules(self) -> float | None:
        now = self._clock()
        since, self._asked = now - self._asked, now
        per_card = [self._of(place, handle, since) for place, handle in enumerate(self._handles)]
        known_joules = [joules for joules in per_card if joules is not None]
        return sum(known_joules) if known_joules else None

    def _of(self, place: int, handle: object, since: float) -> float | None:
        counted = self._nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        if counted is not None:
            return counted * MILLI
        power = self._nvml.ask("nvmlDeviceGetPowerUsage", handle)
        if power is None:
            return None
        self._integrated[place] += power * MILLI * since
        return self._integrated[place]


def open_energy(cards: Sequence[int], stack: ExitStack) -> EnergyCounter | None:
    """The counter of these cards, closed with the stack; None: this machine has no NVML."""
    try:
        return EnergyCounter(stack.enter_context(open_nvml()), cards)
    except NvmlMissing:
        return None
