"""Minimum cost of steps on this machine.

    machine.json (`cairn calibrate`)  >  the chip's data sheet  >  a quick look at an idle CPU  >  nothing is known

The roofline over what the steps computed: the larger of bytes over bandwidth and FLOPs over the matmul rate. Keys and
weights that stay in a cache can beat it; nothing else does. Where several ranks share a model each has its part of the
work. Measures only when it is asked to, and only a CPU: a GPU belongs to the engine.
"""

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings, Identity, Measured, load
from cairn.hw.datasheet import DTYPES, Chip, Dtype, find_chip
from cairn.hw.roofline import Floor, dtype_name, floor
from cairn.models.cache import cache_bytes_per_token
from cairn.models.spec import ModelSpec
from cairn.models.step_cost import Total, total_cost
from cairn.serve.engine.messages import Facts
from cairn.serve.engine.step_times import Spent, StepTimes
from cairn.serve.http.ledger.views import CeilingsView

QUICK_MS = 40.0  # for each of the two measurements
LOOKS, LOOK_AGAIN_S = 5, 10.0
QUICK_BYTES = 64 << 20
LANES = 4  # products of 8-bit numbers that fit where one of 32 bits does, where their rate was not measured
VALUE_BYTES = {
    "float32": 4
}  # of a weight that is not packed; every other dtype we compute in has two


class KnownCeilings(NamedTuple):
    """The ceilings of the device that computes, as far as they are known."""

    ceilings: Ceilings | None = None
    chip: Chip | None = None
    measured: bool = False  # by `cairn calibrate`


class Floors:
    """Floors of an engine."""

    def __init__(
        self,
        spec: ModelSpec,
        facts: Facts,
        ceilings: KnownCeilings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.facts = spec, facts
        self.known = known_ceilings(facts) if ceilings is None else ceilings
        self._clock, self._looks, self._look_at = clock, 0, 0.0
        if facts.read_bytes:
            self._weight_bytes = facts.read_bytes * facts.ranks / spec.matmul_parameters()
        else:
            self._weight_bytes = facts.weights_bytes * facts.ranks / spec.parameters()
        self._value_bytes = facts.kv_bytes_per_token * facts.ranks / cache_bytes_per_token(spec, 1)

    async def look(self, idle: bool) -> None:
        """Take a quick measurement beside the event loop, if there is no better knowledge and no request waits.

        A few times, some seconds apart: other programs slow one down, so the best of them is nearest to the ceiling.
        """
        own = self._looks > 0  # what is known comes from here
        if not idle or self.facts.device != "cpu" or (any(self.known[:2]) and not own):
            return
        if self._looks == LOOKS or self._clock() < self._look_at:
            return
        self._looks += 1
        self._look_at = self._clock() + LOOK_AGAIN_S
        self.known = better(self.known, await asyncio.to_thread(quick_look, self.facts))

    def of_step(self, step: StepTimes) -> Floor | None:
        return self._of(Total(1, step.tokens, step.sampled, step.read, step.pairs))

    def of(self, spent: Spent) -> Floor | None:
        """Floor of all these steps together, a lower bound of the sum of their floors."""
        return self._of(Total(spent.steps, spent.tokens, spent.sampled, spent.read, spent.pairs))

    def view(self) -> CeilingsView:
        ceilings, chip, measured = self.known
        rate = _rate(ceilings, chip, self._dtype())
        copy = chip.bytes_per_s if chip is not None else None
        copy = ceilings.copy.value if ceilings and ceilings.copy else copy
        return CeilingsView(
            memory_gbps=copy / 1e9 if copy else None,
            tflops=rate / 1e12 if rate else None,
            measured=measured,
        )

    def _of(self, total: Total) -> Floor | None:
        if not total.steps or not self._weight_bytes or not any(self.known[:2]):
            return None
        cost = total_cost(self.spec, total, self._weight_bytes, self._value_bytes)
        ranks, (ceilings, chip, _) = self.facts.ranks, self.known
        try:
            return floor(
                cost.flops / ranks / self._lanes(),
                cost.bytes / ranks,
                self._dtype(),
                ceilings,
                launches=0,
                datasheet=chip,
            )
        except HardwareError:  # such as a dtype that was not measured
            return None

    @property
    def _packed(self) -> bool:
        return self._weight_bytes < 0.9 * VALUE_BYTES.get(self.facts.dtype, 2)

    def _lanes(self) -> int:
        return LANES if self._packed and _rate(*self.known[:2], "int8") is None else 1

    def _dtype(self) -> str:
        """Dtype whose matmul rate applies; the fastest one for packed weights."""
        own = dtype_name(self.facts.dtype)
        rates = {dtype: _rate(*self.known[:2], dtype) or 0.0 for dtype in (own, *DTYPES)}
        return max(rates, key=rates.__getitem__) if self._packed or not rates[own] else own


def _rate(ceilings: Ceilings | None, chip: Chip | None, dtype: str) -> float | None:
    if ceilings is not None and dtype in ceilings.matmul:
        return ceilings.matmul[dtype].value
    return chip.flops_per_s.get(dtype) if chip is not None else None


def known_ceilings(facts: Facts) -> KnownCeilings:
    """Stored ceilings, without a measurement."""
    chip, _ = find_chip(facts.device_name)
    try:
        ceilings = load()
    except HardwareError:
        return KnownCeilings(None, chip)
    if ceilings.device_name == facts.device_name:
        return KnownCeilings(ceilings, chip, measured=True)
    return KnownCeilings(None, chip)


def quick_look(facts: Facts) -> KnownCeilings:
    """Rough copy and matmul rates of this CPU, measured in a fifth of a second."""
    from cairn.hw.measure_device import copy_rate, matmul_rate, why_not

    own = dtype_name(facts.dtype)
    dtype: Dtype = next(
        (
            candidate
            for candidate in DTYPES
            if candidate == own and why_not("cpu", candidate) is None
        ),
        "fp32",
    )
    rates: dict[str, Measured] = {dtype: _best(matmul_rate("cpu", dtype, QUICK_MS))}
    unknown = Identity(cpu=None, threads=None, gpus=[], driver=None, torch=None)
    at = datetime.fromtimestamp(time.time(), UTC).isoformat()
    return KnownCeilings(
        Ceilings(
            measured_at=at,
            quick=True,
            identity=unknown,
            device="cpu",
            device_name=facts.device_name,
            copy=_best(copy_rate("cpu", QUICK_BYTES, QUICK_MS)),
            matmul=rates,
        )
    )


def better(one: KnownCeilings, other: KnownCeilings) -> KnownCeilings:
    """The higher of two quick looks, each rate for itself."""
    first, second = one.ceilings, other.ceilings
    if first is None or second is None:
        return one if second is None else other

    def higher(a: Measured | None, b: Measured | None) -> Measured | None:
        return max((m for m in (a, b) if m is not None), key=lambda m: m.value, default=None)

    rates = {
        dtype: ceiling
        for dtype in first.matmul | second.matmul
        if (ceiling := higher(first.matmul.get(dtype), second.matmul.get(dtype))) is not None
    }
    copy = higher(first.copy, second.copy)
    return KnownCeilings(msgspec.structs.replace(second, copy=copy, matmul=rates))


def _best(measured: Measured) -> Measured:
    """A ceiling is what was reached at best: other work slows a quick look down, and nothing speeds it up."""
    return msgspec.structs.replace(measured, value=measured.high)
