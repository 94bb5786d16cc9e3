"""Roofline: the minimum time of an operation on this machine, and its limiting resource.

    floor = max(bytes / bandwidth, flops / rate, launches x launch cost)

Pure arithmetic over measured `Ceilings`: no clock, no device, no torch. It knows nothing about
caches, so an operation whose data stays in L2 can beat its "memory" floor; nor does it know about
communication, which has its own cost model.
"""

import math
from typing import Literal

import msgspec

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings
from cairn.hw.datasheet import Chip

Term = Literal["memory", "compute", "launch"]

# Every spelling that may arrive here: ours, torch's with and without its prefix.
SPELLINGS = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    seconds: float  # no version of the operation runs faster than this
    bound: Term  # the term that is as large as the floor
    memory_s: float
    compute_s: float
    launch_s: float
    intensity: float | None  # FLOP per byte that the operation does; None when it moves no byte
    ridge: float  # FLOP per byte where this machine turns from memory-bound to compute-bound
    from_datasheet: tuple[
        Term, ...
    ] = ()  # terms that rest on a vendor's number instead of a measured one

    def share(self, measured_s: float) -> float:
        """Fraction of the attainable speed that was reached; 1.0 is the floor itself."""
        if measured_s <= 0:
            raise ValueError(f"a measured time is positive, not {measured_s}")
        return self.seconds / measured_s


def floor(
    flops: float,
    bytes_moved: float,
    dtype: object,
    ceilings: Ceilings | None,
    *,
    launches: int = 1,
    in_graph: bool = True,
    datasheet: Chip | None = None,
) -> Floor:
    """The least time for `flops` operations in `dtype` and `bytes_moved` through device memory.

    A ceiling that was not measured is an error, unless a `datasheet` is given to stand in for it.
    """
    _check_work(flops, bytes_moved, launches)
    rate, rate_measured = _rate(dtype_name(dtype), ceilings, datasheet)
    bandwidth, bandwidth_measured = _bandwidth(ceilings, datasheet)
    terms: dict[Term, float] = {
        "memory": bytes_moved / bandwidth,
        "compute": flops / rate,
        "launch": launches * _launch_cost(ceilings, in_graph),
    }
    bound = max(terms, key=lambda term: terms[term])
    return Floor(
        seconds=terms[bound],
        bound=bound,
        memory_s=terms["memory"],
        compute_s=terms["compute"],
        launch_s=terms["launch"],
        intensity=flops / bytes_moved if bytes_moved else None,
        ridge=rate / bandwidth,
        from_datasheet=_leads(memory=bandwidth_measured, compute=rate_measured),
    )


def dtype_name(dtype: object) -> str:
    """`torch.bfloat16`, "bfloat16" and "bf16" are all "bf16"."""
    name = str(dtype).removeprefix("torch.")
    return SPELLINGS.get(name, name)


def _check_work(flops: float, bytes_moved: float, launches: int) -> None:
    for what, amount in (("flops", flops), ("bytes_moved", bytes_moved), ("launches", launches)):
        if not (amount >= 0 and math.isfinite(amount)):
            raise ValueError(f"{what} is a finite count, not {amount}")


def _rate(dtype: str, ceilings: Ceilings | None, datasheet: Chip | None) -> tuple[float, bool]:
    """FLOP/s of the dtype, and whether it was measured."""
    if ceilings is not None and dtype in ceilings.matmul:
        return ceilings.matmul[dtype].value, True
    if datasheet is not None and dtype in datasheet.flops_per_s:
        return datasheet.flops_per_s[dtype], False
    raise _unmeasured(f"matmul rate for {dtype}", f"matmul.{dtype}", ceilings)


def _bandwidth(ceilings: Ceilings | None, datasheet: Chip | None) -> tuple[float, bool]:
    if ceilings is not None and ceilings.copy is not None:
        return ceilings.copy.value, True
    if datasheet is not None:
        return datasheet.bytes_per_s, False
    raise _unmeasured("memory bandwidth", "copy", ceilings)


def _launch_cost(ceilings: Ceilings | None, in_graph: bool) -> float:
    """Nothing when it was not measured: no datasheet has it, and a lower floor stays a floor."""
    if ceilings is None:
        return 0.0
    cost = (ceilings.launch_in_graph if in_graph else None) or ceilings.launch
    return cost.value if cost is not None else 0.0


def _leads(**measured: bool) -> tuple[Term, ...]:
    terms: tuple[Term, ...] = ("memory", "compute")
    return tuple(term for term in terms if not measured[term])


def _unmeasured(what: str, key: str, ceilings: Ceilings | None) -> HardwareError:
    if ceilings is None:
        return HardwareError(f"no measured {what}", hint="run `cairn calibrate`")
    if key in ceilings.absent:
        return HardwareError(
            f"{ceilings.device_name} has no measured {what}: {ceilings.absent[key]}",
            hint="choose another dtype, or run `cairn calibrate` again if that has changed",
        )
    return HardwareError(
        f"machine.json of {ceilings.measured_at} has no {what} on {ceilings.device_name}",
        hint=f"run `cairn calibrate`; measured are: {', '.join(sorted(ceilings.matmul)) or 'none'}",
    )
