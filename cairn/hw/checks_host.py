"""Do the CPU, the memory, the limits and the disks leave room to run?

Pure functions over `HardwareEvidence`. The thresholds are what the smallest sensible job needs, not what a
large one would like.
"""

from cairn.core.units import format_bytes
from cairn.hw.evidence import HardwareEvidence, WritableFolder
from cairn.hw.findings import HardwareFinding, fail, ok, warn
from cairn.hw.transfer_path import transfer_paths

GIBI = 1 << 30
ENOUGH_MEMORY = 8 * GIBI
ENOUGH_SHM = 1 * GIBI  # a data loader or a small gang of ranks; Docker's default is 64 MiB
ENOUGH_OPEN_FILES = 4096  # sockets of a server plus shards of a checkpoint
ENOUGH_HUB_DISK = 20 * GIBI  # one 8B model in bf16 is 16 GB
ENOUGH_CACHE_DISK = 1 * GIBI


def check_cpu(evidence: HardwareEvidence) -> HardwareFinding:
    cpu = evidence.machine.cpu
    threads = cpu.usable_threads or cpu.threads or 1
    if cpu.quota is not None and cpu.quota < threads:
        return warn(
            f"{threads} threads are visible, the container grants {cpu.quota:g} CPUs",
            f"export OMP_NUM_THREADS={max(1, int(cpu.quota))}, or raise the limit",
        )
    return ok(f"{threads} threads of {cpu.model or 'an unknown CPU'}")


def check_numa(evidence: HardwareEvidence) -> HardwareFinding | None:
    machine = evidence.machine
    if len(machine.numa) < 2 or machine.limits.numa_balancing is None:
        return None
    if machine.limits.numa_balancing and machine.gpus:
        return warn(
            f"automatic NUMA balancing moves pages between {len(machine.numa)} nodes during a run",
            "sudo sysctl kernel.numa_balancing=0",
        )
    state = "on" if machine.limits.numa_balancing else "off"
    return ok(f"{len(machine.numa)} nodes, automatic balancing {state}")


def check_memory(evidence: HardwareEvidence) -> HardwareFinding:
    memory = evidence.machine.memory
    usable = memory.usable_bytes
    if usable is None:
        return warn("the size of the memory is unknown", "pip install psutil")
    limited = memory.limit_bytes is not None and usable == memory.limit_bytes
    why = f"{format_bytes(usable)}" + (" (limit of the container)" if limited else "")
    if usable < ENOUGH_MEMORY:
        return warn(
            f"{why}: small models only", "raise the memory limit" if limited else "add memory"
        )
    return ok(why)


def check_shm(evidence: HardwareEvidence) -> HardwareFinding | None:
    size = evidence.machine.memory.shm_bytes
    if size is None:
        return None
    if size < ENOUGH_SHM:
        return warn(
            f"/dev/shm has {format_bytes(size)}: worker processes share tensors there",
            "start the container with --shm-size=8g or --ipc=host",
        )
    return ok(format_bytes(size))


def check_open_files(evidence: HardwareEvidence) -> HardwareFinding | None:
    limit = evidence.machine.limits.open_files
    if limit is None:
        return None
    if limit != "unlimited" and limit < ENOUGH_OPEN_FILES:
        return warn(f"at most {limit} open files", "ulimit -n 65536")
    return ok(str(limit))


def check_locked_memory(evidence: HardwareEvidence) -> HardwareFinding | None:
    limit = evidence.machine.limits.locked_memory_bytes
    if limit is None:
        return None
    if limit == "unlimited":
        return ok("unlimited")
    if evidence.machine.fabrics:
        return warn(
            f"at most {format_bytes(limit)} of locked memory; InfiniBand locks its buffers",
            "ulimit -l unlimited, or start the container with --ulimit memlock=-1",
        )
    return ok(f"{format_bytes(limit)}; only InfiniBand needs more, and there is none")


def check_transfer(evidence: HardwareEvidence) -> HardwareFinding:
    """Check the transports of KV blocks and weights between processes and between machines."""
    paths = transfer_paths(evidence.machine, evidence.nixl, evidence.peer_memory)
    why = f"between machines {paths.between} ({paths.why}); on this one {paths.within}"
    return ok(why) if paths.better is None else warn(why, paths.better)


def check_hub_cache(evidence: HardwareEvidence) -> HardwareFinding | None:
    return _judge_place(
        evidence.hub_cache, ENOUGH_HUB_DISK, "downloaded models", "set HF_HOME to", needed=False
    )


def check_cairn_cache(evidence: HardwareEvidence) -> HardwareFinding | None:
    return _judge_place(
        evidence.cairn_cache, ENOUGH_CACHE_DISK, "results", "set CAIRN_CACHE to", needed=True
    )


def _judge_place(
    place: WritableFolder | None, enough: int, holds: str, move: str, needed: bool
) -> HardwareFinding | None:
    if place is None:
        return None
    path, free = place.filesystem.path, place.filesystem.free_bytes or 0
    if not place.writable:
        judge = fail if needed else warn  # a shared read-only folder of models is a sound set-up
        return judge(f"{path} cannot be written", f"{move} a folder that you own")
    why = f"{path} has {format_bytes(free)} free"
    if free < enough:
        return warn(f"{why} for {holds}", f"free some, or {move} a larger disk")
    return ok(why)
