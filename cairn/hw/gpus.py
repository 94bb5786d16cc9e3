"""GPUs of this machine.

Asks the best source that is there (NVML, else torch) and fills in from /sys what
that source left open. Says in a note when it had to do without a better one. Knows nothing about
speed.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec

from cairn.hw.machine import Gpu, PcieLink
from cairn.hw.nvml import NvmlMissing, gpus_from_nvml, open_nvml
from cairn.hw.sysfs import read_int, read_node, read_text

# What a driver leaves behind: NVIDIA on Linux, NVIDIA inside WSL, AMD.
DRIVER_MARKS = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg", "dev/kfd")

# PCI Express transfer rate to generation; /sys writes "32.0 GT/s PCIe".
GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}

Source = Callable[[], list[Gpu]]


class TorchMissing(Exception):
    """torch does not import, or sees no GPU: the message says which."""


def read_gpus(root: Path) -> tuple[list[Gpu], list[str]]:
    """Every GPU, and a note for each source that was passed over. No driver: no GPUs, no notes."""
    if not any((root / mark).exists() for mark in DRIVER_MARKS):
        return [], []
    gpus, notes = first_answer([_from_nvml, gpus_from_torch])
    return [complete_from_sysfs(gpu, root) for gpu in gpus], notes


def first_answer(sources: list[Source]) -> tuple[list[Gpu], list[str]]:
    notes: list[str] = []
    for source in sources:
        try:
            return source(), notes
        except (NvmlMissing, TorchMissing) as error:
            notes.append(f"GPUs: {error}")
    return [], [*notes, "GPUs: a driver is loaded, but nothing here can ask it"]


def gpus_from_torch() -> list[Gpu]:
    """The visible GPUs with what a CUDA program can see of them: no power, no ECC, no processes."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: a shared library of CUDA is missing
        raise TorchMissing(f"torch does not import: {error}") from error
    if not torch.cuda.is_available():
        raise TorchMissing(f"torch {torch.__version__} sees no GPU")
    return [_torch_gpu(index) for index in range(torch.cuda.device_count())]


def complete_from_sysfs(gpu: Gpu, root: Path) -> Gpu:
    """NUMA node always, and the link where the source did not say."""
    if gpu.pci_bus is None:
        return gpu
    device = root / "sys/bus/pci/devices" / gpu.pci_bus
    pcie = gpu.pcie if gpu.pcie.max_width is not None else _sysfs_link(device)
    return msgspec.structs.replace(gpu, pcie=pcie, numa_node=read_node(device / "numa_node"))


def _from_nvml() -> list[Gpu]:
    with open_nvml() as nvml:
        return gpus_from_nvml(nvml)


def _torch_gpu(index: int) -> Gpu:
    import torch

    properties = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    place = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    bus = None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place)
    return Gpu(
        index=index,
        source="torch",
        name=properties.name,
        uuid=torch_uuid(index),
        pci_bus=bus,
        memory_bytes=total,
        memory_used_bytes=total - free,
        capability=f"{properties.major}.{properties.minor}",
        sm_count=properties.multi_processor_count,
        l2_bytes=getattr(properties, "L2_cache_size", None),
    )


def torch_uuid(index: int) -> str | None:
    """UUID of a visible GPU in NVML's format."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return f"GPU-{properties.uuid}" if hasattr(properties, "uuid") else None


def _sysfs_link(device: Path) -> PcieLink:
    def generation(name: str) -> int | None:
        rate, _, _ = (read_text(device / name) or "").partition(" ")
        return GENERATIONS.get(rate)

    return PcieLink(
        generation=generation("current_link_speed"),
        width=read_int(device / "current_link_width"),
        max_generation=generation("max_link_speed"),
        max_width=read_int(device / "max_link_width"),
    )
