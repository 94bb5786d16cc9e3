"""The types that describe a machine.

Only the types that `probe` fills in; nothing here opens a file or asks a driver. A field that is
None could not be read (or does not exist there); no field is ever a guess.

    Machine
    ├── cpu       Cpu ── caches
    ├── memory    Memory          what the machine has, and what this process may take of it
    ├── numa      [NumaNode]
    ├── gpus      [Gpu] ── pcie, ecc, processes
    ├── nics      [Nic]           ethernet and friends
    ├── fabrics   [FabricPort]    InfiniBand and RoCE
    ├── cache     Filesystem      where Cairn keeps what it may lose
    ├── limits    Limits          ulimits and kernel switches
    └── versions  Versions
"""

from typing import Literal

import msgspec

Unlimited = Literal["unlimited"]


class CpuCache(msgspec.Struct, frozen=True, kw_only=True):
    level: int
    kind: str  # "Data", "Instruction" or "Unified"
    size_bytes: int


class Cpu(msgspec.Struct, frozen=True, kw_only=True):
    model: str | None = None
    architecture: str | None = None
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None
    usable_threads: int | None = None  # what the affinity mask of this process allows
    quota: float | None = None  # CPUs that the cgroup grants; None when it sets no limit
    features: list[str] = []
    caches: list[CpuCache] = []

    @property
    def last_level_bytes(self) -> int | None:
        """Size of the largest cache: what a buffer must exceed for a test to reach memory."""
        return max((cache.size_bytes for cache in self.caches), default=None)


class HostMemory(msgspec.Struct, frozen=True, kw_only=True):
    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None  # the cgroup's; None when it sets no limit
    used_bytes: int | None = None  # of that limit
    shm_bytes: int | None = None  # size of /dev/shm, where worker processes share tensors

    @property
    def usable_bytes(self) -> int | None:
        """Memory that this process may use in total: the smaller of the machine's and the cgroup's."""
        return min((x for x in (self.total_bytes, self.limit_bytes) if x is not None), default=None)

    @property
    def free_bytes(self) -> int | None:
        """Memory that this process may still allocate, by the machine and by the cgroup."""
        limit = self.limit_bytes
        left = max(0, limit - (self.used_bytes or 0)) if limit is not None else None
        return min((x for x in (self.available_bytes, left) if x is not None), default=None)


class NumaNode(msgspec.Struct, frozen=True, kw_only=True):
    node: int
    cpus: list[int] = []
    memory_bytes: int | None = None


class PcieLink(msgspec.Struct, frozen=True, kw_only=True):
    """The current generation drops while a card idles, to save power; the width does not."""

    generation: int | None = None
    width: int | None = None
    max_generation: int | None = None
    max_width: int | None = None


class Ecc(msgspec.Struct, frozen=True, kw_only=True):
    enabled: bool | None = None
    uncorrected: int | None = None  # since the driver was loaded
    remapped_rows: int | None = None  # replaced for good after an uncorrectable error
    remap_pending: bool | None = None  # a row waits for the next reset to be replaced
    remap_failed: bool | None = None  # no spare row was left


class GpuProcess(msgspec.Struct, frozen=True, kw_only=True):
    pid: int
    memory_bytes: int | None = None


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    name: str
    source: Literal["nvml", "torch"]
    uuid: str | None = None
    pci_bus: str | None = None  # as /sys/bus/pci/devices spells it
    memory_bytes: int | None = None
    memory_used_bytes: int | None = None
    capability: str | None = None  # compute capability, "9.0"
    sm_count: int | None = None
    l2_bytes: int | None = None
    max_sm_clock_hz: int | None = None
    max_memory_clock_hz: int | None = None
    power_limit_w: float | None = None
    pcie: PcieLink = PcieLink()
    ecc: Ecc = Ecc()
    mig: bool | None = None  # is the card cut into slices
    nvlinks: int | None = None  # links that are up
    numa_node: int | None = None
    slowdowns: list[str] = []  # why the hardware holds the clock down right now
    processes: list[GpuProcess] = []  # the driver hides those of other containers


class Nic(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    up: bool | None = None
    speed_bits_per_s: int | None = None
    mtu: int | None = None
    driver: str | None = None
    numa_node: int | None = None


class FabricPort(msgspec.Struct, frozen=True, kw_only=True):
    device: str
    port: int
    link_layer: str | None = None  # "InfiniBand", or "Ethernet" for RoCE
    active: bool | None = None
    rate_bits_per_s: int | None = None
    numa_node: int | None = None


class Filesystem(msgspec.Struct, frozen=True, kw_only=True):
    path: str  # what was asked about
    mount: str | None = None
    kind: str | None = None  # "ext4", "tmpfs", "nfs4"
    total_bytes: int | None = None
    free_bytes: int | None = None  # to an ordinary user
    rotational: bool | None = None


class ResourceLimits(msgspec.Struct, frozen=True, kw_only=True):
    open_files: int | Unlimited | None = None
    locked_memory_bytes: int | Unlimited | None = None
    numa_balancing: bool | None = None
    profiling_admin_only: bool | None = None  # may only root read the GPU's counters


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    python: str | None = None
    cairn: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None  # the CUDA that torch was built for
    triton: str | None = None
    nccl: str | None = None
    numpy: str | None = None
    driver: str | None = None
    driver_cuda: str | None = None  # the newest CUDA that the driver can run


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    cpu: Cpu = Cpu()
    memory: HostMemory = HostMemory()
    numa: list[NumaNode] = []
    gpus: list[Gpu] = []
    nics: list[Nic] = []
    fabrics: list[FabricPort] = []
    cache: Filesystem | None = None
    limits: ResourceLimits = ResourceLimits()
    versions: Versions = Versions()
    kernel: str | None = None
    container: str | None = None  # "docker", "podman", "kubernetes", "lxc"
    virtual: bool | None = None  # is there a hypervisor below
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES as it is set
    notes: list[str] = []  # what could not be read, and for want of what
