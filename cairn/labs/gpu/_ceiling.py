"""A ceiling of this machine by name, or what to do where it was not measured."""

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import Ceilings, Measured


def ceiling(ceilings: Ceilings, name: str) -> float:
    """`name`: a field of `Ceilings` ("copy", "launch") or "matmul.fp32"."""
    kind, _, dtype = name.partition(".")
    measured = ceilings.matmul.get(dtype) if dtype else getattr(ceilings, kind)
    if not isinstance(measured, Measured):
        why = ceilings.absent.get(name, "it was not measured")
        raise HardwareError(
            f"{ceilings.device_name} has no ceiling '{name}': {why}", hint="run `cairn calibrate`"
        )
    return measured.value
