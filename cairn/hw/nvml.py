"""GPU information from NVML, the management library of the driver.

Speaks to NVML through the package nvidia-ml-py (module `pynvml`), which a GPU host may lack. Reads
only; never changes a setting of a card. Does not know torch: NVML lists every card, torch only the
visible ones.
"""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from cairn.hw.machine import Ecc, Gpu, GpuProcess, PcieLink

# NVML counts CUDA cores; an SM has this many (CUDA C++ programming guide, compute capabilities).
CORES_PER_SM = {"7.0": 64, "7.5": 64, "8.0": 64, "8.6": 128, "8.9": 128, "9.0": 128, "10.0": 128}

# Bits of the clock-event mask that mean "slower than asked, by force".
SLOWDOWN_BITS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}


class NvmlMissing(Exception):
    """The package or the library is not there, or does not start: the message says which."""


class Nvml:
    """NVML with one change: a question that card, driver or package cannot answer gives None."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module

    def ask(self, question: str, *arguments: Any) -> Any:
        function = getattr(self.module, question, None)
        if function is None:  # an older package
            return None
        try:
            answer = function(*arguments)
        except self.module.NVMLError:
            return None
        return answer.decode() if isinstance(answer, bytes) else answer


@contextmanager
def open_nvml() -> Generator[Nvml]:
    try:
        import pynvml
    except ImportError as error:
        raise NvmlMissing("the package nvidia-ml-py is not installed") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NvmlMissing(f"NVML does not start: {error}") from error
    try:
        yield Nvml(pynvml)
    finally:
        pynvml.nvmlShutdown()


def gpus_from_nvml(nvml: Nvml) -> list[Gpu]:
    return [_gpu(nvml, index, handle) for index, handle in _handles(nvml)]


def handles_of(nvml: Nvml, uuids: Collection[str]) -> list[Any]:
    """NVML handles of the cards with these UUIDs."""
    return [
        handle for _, handle in _handles(nvml) if nvml.ask("nvmlDeviceGetUUID", handle) in uuids
    ]


def _handles(nvml: Nvml) -> list[tuple[int, Any]]:
    count = nvml.ask("nvmlDeviceGetCount") or 0
    handles = [(index, nvml.ask("nvmlDeviceGetHandleByIndex", index)) for index in range(count)]
    return [(index, handle) for index, handle in handles if handle is not None]


def _gpu(nvml: Nvml, index: int, handle: object) -> Gpu:
    memory = nvml.ask("nvmlDeviceGetMemoryInfo", handle)
    capability = nvml.ask("nvmlDeviceGetCudaComputeCapability", handle)
    capability = f"{capability[0]}.{capability[1]}" if capability else None
    milliwatts = nvml.ask("nvmlDeviceGetEnforcedPowerLimit", handle)
    mig = nvml.ask("nvmlDeviceGetMigMode", handle)
    return Gpu(
        index=index,
        source="nvml",
        name=nvml.ask("nvmlDeviceGetName", handle) or "unknown GPU",
        uuid=nvml.ask("nvmlDeviceGetUUID", handle),
        pci_bus=_pci_bus(nvml, handle),
        memory_bytes=memory.total if memory else None,
        memory_used_bytes=memory.used if memory else None,
        capability=capability,
        sm_count=_sm_count(nvml, handle, capability),
        max_sm_clock_hz=_clock(nvml, handle, "NVML_CLOCK_SM"),
        max_memory_clock_hz=_clock(nvml, handle, "NVML_CLOCK_MEM"),
        power_limit_w=milliwatts / 1000 if milliwatts else None,
        pcie=_pcie(nvml, handle),
        ecc=_ecc(nvml, handle),
        mig=bool(mig[0]) if mig else None,
        nvlinks=_nvlinks(nvml, handle),
        slowdowns=_slowdowns(nvml, handle),
        processes=_processes(nvml, handle),
    )


def sysfs_bus(bus: str) -> str:
    """NVML writes `00000000:3B:00.0`, the kernel `0000:3b:00.0`."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _pci_bus(nvml: Nvml, handle: object) -> str | None:
    info = nvml.ask("nvmlDeviceGetPciInfo", handle)
    if info is None:
        return None
    bus = info.busId.decode() if isinstance(info.busId, bytes) else info.busId
    return sysfs_bus(bus)


def _sm_count(nvml: Nvml, handle: object, capability: str | None) -> int | None:
    cores, per_sm = nvml.ask("nvmlDeviceGetNumGpuCores", handle), CORES_PER_SM.get(capability or "")
    return cores // per_sm if cores and per_sm else None


def _clock(nvml: Nvml, handle: object, kind: str) -> int | None:
    megahertz = nvml.ask("nvmlDeviceGetMaxClockInfo", handle, getattr(nvml.module, kind, None))
    return megahertz * 1_000_000 if megahertz else None


def _pcie(nvml: Nvml, handle: object) -> PcieLink:
    return PcieLink(
        generation=nvml.ask("nvmlDeviceGetCurrPcieLinkGeneration", handle),
        width=nvml.ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        max_generation=nvml.ask("nvmlDeviceGetMaxPcieLinkGeneration", handle),
        max_width=nvml.ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def _ecc(nvml: Nvml, handle: object) -> Ecc:
    mode = nvml.ask("nvmlDeviceGetEccMode", handle)  # current, after the next reset
    kind = getattr(nvml.module, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", None)
    span = getattr(nvml.module, "NVML_VOLATILE_ECC", None)
    rows = nvml.ask(
        "nvmlDeviceGetRemappedRows", handle
    )  # correctable, uncorrectable, pending, failed
    return Ecc(
        enabled=bool(mode[0]) if mode else None,
        uncorrected=nvml.ask("nvmlDeviceGetTotalEccErrors", handle, kind, span),
        remapped_rows=int(rows[1]) if rows else None,
        remap_pending=bool(rows[2]) if rows else None,
        remap_failed=bool(rows[3]) if rows else None,
    )


def _nvlinks(nvml: Nvml, handle: object) -> int | None:
    links = range(getattr(nvml.module, "NVML_NVLINK_MAX_LINKS", 18))
    states = [nvml.ask("nvmlDeviceGetNvLinkState", handle, link) for link in links]
    answers = [
        state for state in states if state is not None
    ]  # a card has fewer links than the maximum
    return sum(bool(state) for state in answers) if answers else None


def _slowdowns(nvml: Nvml, handle: object) -> list[str]:
    mask = nvml.ask("nvmlDeviceGetCurrentClocksEventReasons", handle) or nvml.ask(
        "nvmlDeviceGetCurrentClocksThrottleReasons", handle
    )
    return [reason for bit, reason in SLOWDOWN_BITS.items() if (mask or 0) & bit]


def _processes(nvml: Nvml, handle: object) -> list[GpuProcess]:
    running = nvml.ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
    return [GpuProcess(pid=process.pid, memory_bytes=process.usedGpuMemory) for process in running]
