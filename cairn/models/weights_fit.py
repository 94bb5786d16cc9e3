"""Do the weights fit? Asked before they are loaded, when a no costs nothing and says what would fit.

    parameters * bytes of a value / ranks   <=   what is free on the device

Without the question a host would swap or end the process, and a GPU would say so after a minute of loading. Pages of
the cache and the room of a step are the engine's to count, once the weights are there (`serve/engine/sizing`).
"""

import math
from pathlib import Path

import torch

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes, format_count
from cairn.hw.host import read_memory
from cairn.models.presets import PRESETS
from cairn.models.spec import ModelSpec

USABLE = 0.9  # of a device, by weights that are shared: the rest is for the cache and the step


def check_fits(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: str,
    ranks: int = 1,
    mapped: bool = False,
    stored_bytes: int | None = None,
) -> None:
    """`mapped`: the file is read in place, so that the host can take its pages back when it needs them.

    `stored_bytes`: of weights that stay quantised as they are stored.
    """
    free = free_bytes(device, mapped)
    if free is None:
        return
    if stored_bytes is None:
        refuse_what_does_not_fit(name, spec, dtype, device, ranks, free)
    elif stored_bytes // ranks > free:
        raise HardwareError(
            f"{name} needs {format_bytes(stored_bytes // ranks)} for its quantised weights on each of {ranks} ranks, "
            f"and {format_bytes(free)} are free on {device}",
            hint="use more ranks (tensor_parallel_size), or a checkpoint with fewer bits",
        )


def free_bytes(device: str, mapped: bool = False) -> int | None:
    """Free memory of the device or container in bytes; None if unknown."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    memory = read_memory(Path("/"))[0]
    return memory.usable_bytes if mapped else memory.free_bytes


def refuse_what_does_not_fit(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: str, ranks: int, free: int
) -> None:
    needed = spec.parameters() * dtype.itemsize // ranks
    if needed <= free:
        return
    shared = f" on each of {ranks} ranks" if ranks > 1 else ""
    raise HardwareError(
        f"{name} needs {format_bytes(needed)} for its {format_count(spec.parameters())} parameters in "
        f"{str(dtype).removeprefix('torch.')}{shared}, and {format_bytes(free)} are free on {device}",
        hint=what_would_fit(spec, dtype, ranks, free, device),
    )


def what_would_fit(spec: ModelSpec, dtype: torch.dtype, ranks: int, free: int, device: str) -> str:
    """Fewer bits, more ranks, or a smaller model: what this memory has room for."""
    ways = []
    if dtype.itemsize > 2 and spec.parameters() * 2 // ranks <= free:
        ways.append("dtype bfloat16")
    if torch.device(device).type == "cuda":
        needed = math.ceil(spec.parameters() * dtype.itemsize / (USABLE * free))
        ways.append(f"tensor_parallel_size {2 ** math.ceil(math.log2(needed))}")
    most = free // dtype.itemsize * ranks
    shapes = ((build().parameters(), name) for name, build in PRESETS.items())
    fitting = [(size, name) for size, name in shapes if size <= most]
    such = f", such as {max(fitting)[1]}" if fitting else ""
    ways.append(f"a model of at most {format_count(most)} parameters{such}")
    return f"use {', or '.join(ways)}"
