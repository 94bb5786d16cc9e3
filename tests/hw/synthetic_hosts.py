"""Folders that look like /proc and /sys of machines we do not have, and the machines themselves."""

from pathlib import Path

from cairn.hw.ceilings import Ceilings, Identity, Measured
from cairn.hw.machine import Cpu, Ecc, Gpu, HostMemory, Machine, PcieLink, ResourceLimits, Versions

GIBI = 1 << 30

X86_CPUINFO = """processor	: 0
model name	: Imaginary Xeon 9000
flags		: fpu vme avx2 avx512f avx512_bf16 amx_tile amx_bf16 amx_int8 hypervisor

processor	: 1
model name	: Imaginary Xeon 9000
flags		: fpu
"""

TWO_SOCKETS = {
    "proc/cpuinfo": X86_CPUINFO,
    "proc/meminfo": "MemTotal:       1048576 kB\nMemFree: 1 kB\nMemAvailable:    524288 kB\n",
    "proc/self/cgroup": "0::/batch/job\n",
    "proc/1/cgroup": "0::/\n",
    "proc/self/mounts": "/dev/sda / ext4 rw 0 0\n",
    "proc/sys/kernel/osrelease": "6.1.0-imaginary\n",
    "proc/sys/kernel/numa_balancing": "1\n",
    "proc/driver/nvidia/params": "ResmanDebugLevel: 4\nRmProfilingAdminOnly: 1\n",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    ),
    "sys/devices/system/cpu/online": "0-3\n",
    "sys/devices/system/cpu/cpu0/cache/index0/level": "1\n",
    "sys/devices/system/cpu/cpu0/cache/index0/type": "Data\n",
    "sys/devices/system/cpu/cpu0/cache/index0/size": "48K\n",
    "sys/devices/system/cpu/cpu0/cache/index3/level": "3\n",
    "sys/devices/system/cpu/cpu0/cache/index3/type": "Unified\n",
    "sys/devices/system/cpu/cpu0/cache/index3/size": "100M\n",
    **{
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": f"{value}\n"
        for cpu, socket in enumerate((0, 0, 1, 1))
        for name, value in (("physical_package_id", socket), ("core_id", cpu % 2))
    },
    "sys/devices/system/node/node0/cpulist": "0-1\n",
    "sys/devices/system/node/node0/meminfo": "Node 0 MemTotal:  524288 kB\n",
    "sys/devices/system/node/node1/cpulist": "2,3\n",
    "sys/devices/system/node/node1/meminfo": "Node 1 MemTotal:  524288 kB\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
    "sys/fs/cgroup/batch/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/batch/job/cpu.max": "max 100000\n",
    "sys/fs/cgroup/batch/job/memory.max": "268435456\n",
    "sys/fs/cgroup/batch/job/memory.current": "5242880\n",
    "sys/fs/cgroup/batch/job/memory.stat": "anon 1048576\nfile 4718592\nshmem 524288\n",
    "sys/class/net/lo/mtu": "65536\n",
    "sys/class/net/eth0/operstate": "up\n",
    "sys/class/net/eth0/speed": "100000\n",
    "sys/class/net/eth0/mtu": "9000\n",
    "sys/class/net/eth0/device/numa_node": "1\n",
    "sys/class/net/down0/operstate": "down\n",
    "sys/class/net/down0/speed": "-1\n",
    "sys/class/net/bonding_masters": "bond0\n",
    "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    "sys/class/infiniband/mlx5_0/device/numa_node": "-1\n",
}


def plant(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return root


def healthy_gpu(index: int = 0) -> Gpu:
    return Gpu(
        index=index,
        name="NVIDIA H200",
        source="nvml",
        memory_bytes=141 * 10**9,
        memory_used_bytes=500 << 20,
        pcie=PcieLink(generation=1, width=16, max_generation=5, max_width=16),
        ecc=Ecc(enabled=True, uncorrected=0, remapped_rows=0, remap_pending=False),
    )


def healthy_machine(gpus: int = 1) -> Machine:
    return Machine(
        cpu=Cpu(model="Imaginary Xeon 9000", threads=64, usable_threads=64),
        memory=HostMemory(total_bytes=512 * GIBI, available_bytes=500 * GIBI, shm_bytes=64 * GIBI),
        gpus=[healthy_gpu(index) for index in range(gpus)],
        limits=ResourceLimits(open_files=65536, locked_memory_bytes="unlimited"),
        versions=Versions(
            python="3.12.3",
            torch="2.11.0+cu130",
            torch_cuda="13.0",
            triton="3.6.0",
            driver="580.65.06",
            driver_cuda="13.0",
        ),
    )


def measured(value: float, unit: str = "B/s") -> Measured:
    return Measured(value=value, unit=unit, low=value, high=value, runs=9, how="imagined")


def some_ceilings(**changes: object) -> Ceilings:
    """Round numbers near an H200's."""
    fields = {
        "measured_at": "2026-01-01T00:00:00+00:00",
        "quick": False,
        "identity": Identity(
            cpu="Imaginary Xeon 9000",
            threads=64,
            gpus=["NVIDIA H200"],
            driver="580.65.06",
            torch="2.11.0+cu130",
        ),
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
        "copy": measured(4e12),
        "matmul": {"bf16": measured(8e14, "FLOP/s"), "fp32": measured(5e13, "FLOP/s")},
        "launch": measured(1e-5, "s"),
        "launch_in_graph": measured(1e-6, "s"),
        "absent": {"matmul.fp8": "this chip has no fp8"},
    }
    return Ceilings(**(fields | changes))
