"""Energy of a GPU by the counter of the card: joules since the driver was loaded.

`EnergyCounter.joules` is the sum over the cards it was made for. A card without a counter is integrated from its power
on every call. Without NVML there is nothing to read, and None is the answer. Cards are named by UUID: torch numbers
those that CUDA_VISIBLE_DEVICES leaves, NVML all of the machine.
"""

import time
from collections.abc import Callable, Collection
from contextlib import ExitStack

from cairn.hw.nvml import Nvml, NvmlMissing, handles_of, open_nvml

MILLI = 1e-3


class EnergyCounter:
    def __init__(
        self, nvml: Nvml, uuids: Collection[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml, self._clock = nvml, clock
        self._handles = handles_of(nvml, uuids)
        self._integrated = dict.fromkeys(range(len(self._handles)), 0.0)
        self._asked = clock()

    def joules(self) -> float | None:
        now = self._clock()
        since, self._asked = now - self._asked, now
        per_card = [self._of(place, handle, since) for place, handle in enumerate(self._handles)]
        known_joules = [joules for joules in per_card if joules is not None]
        return sum(known_joules) if known_joules else None

    def watts(self) -> float | None:
        """Current power of the cards in watts, which the driver averages over up to a second."""
        found = [self._nvml.ask("nvmlDeviceGetPowerUsage", handle) for handle in self._handles]
        known = [milliwatts * MILLI for milliwatts in found if milliwatts is not None]
        return sum(known) if known else None

    def _of(self, place: int, handle: object, since: float) -> float | None:
        counted = self._nvml.ask("nvmlDeviceGetTotalEnergyConsumption", handle)
        if counted is not None:
            return counted * MILLI
        power = self._nvml.ask("nvmlDeviceGetPowerUsage", handle)
        if power is None:
            return None
        self._integrated[place] += power * MILLI * since
        return self._integrated[place]


def open_energy(uuids: Collection[str], stack: ExitStack) -> EnergyCounter | None:
    """The counter of these cards, closed with the stack; None: this machine has no NVML."""
    try:
        return EnergyCounter(stack.enter_context(open_nvml()), uuids)
    except NvmlMissing:
        return None
