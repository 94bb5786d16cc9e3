"""The probe reads strange machines without falling over, and known ones right."""

import subprocess
import sys
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis.strategies import dictionaries, sampled_from, text
from synthetic_hosts import TWO_SOCKETS, plant

from cairn.hw.host import read_container, read_cpu, read_limits, read_memory, read_numa
from cairn.hw.machine import Filesystem, HostMemory, Machine
from cairn.hw.network import read_fabrics, read_nics
from cairn.hw.probe import probe
from cairn.hw.storage import cache_folder, hub_folder, read_filesystem
from cairn.hw.sysfs import parse_range_list, parse_size
from cairn.hw.versions import parse_version, read_versions


def test_cpu_of_two_sockets(tmp_path):
    cpu = read_cpu(plant(tmp_path, TWO_SOCKETS))
    assert cpu.model == "Imaginary Xeon 9000"
    assert (cpu.sockets, cpu.cores, cpu.threads) == (2, 4, 4)
    assert cpu.features == ["avx2", "avx512", "avx512-bf16", "amx", "amx-bf16", "amx-int8"]
    assert [(cache.level, cache.size_bytes) for cache in cpu.caches] == [
        (1, 48 << 10),
        (3, 100 << 20),
    ]
    assert cpu.last_level_bytes == 100 << 20


def test_two_threads_of_one_core_are_one_core(tmp_path):
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/{name}": "0"
        for cpu in (0, 1)
        for name in ("physical_package_id", "core_id")
    }
    cpu = read_cpu(plant(tmp_path, siblings))
    assert (cpu.sockets, cpu.cores) == (1, 1)


def test_arm_names_itself_by_number(tmp_path):
    info = "processor : 0\nFeatures : fp asimd sve bf16\nCPU implementer : 0x41\nCPU part : 0xd4f\n"
    cpu = read_cpu(plant(tmp_path, {"proc/cpuinfo": info}))
    assert cpu.model == "Arm Neoverse V2"
    assert cpu.features == ["neon", "sve", "bf16"]


def test_cgroup_v2_takes_the_tightest_limit_on_the_way_up(tmp_path):
    root = plant(tmp_path, TWO_SOCKETS)
    memory, notes = read_memory(root)
    assert read_cpu(root).quota == 1.5
    assert (memory.total_bytes, memory.limit_bytes) == (1 << 30, 256 << 20)
    assert memory.usable_bytes == 256 << 20
    assert memory.free_bytes == 255 << 20  # files that lie in memory are given back
    assert notes == []


def test_cgroup_v1(tmp_path):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/a/b\n1:cpu,cpuacct:/a\n0::/\n",
            "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "50000",
            "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "1073741824",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes": "12288",
            "sys/fs/cgroup/memory/a/memory.stat": "cache 1\ntotal_cache 8192\ntotal_shmem 0\n",
        },
    )
    memory, _ = read_memory(root)
    assert read_cpu(root).quota == 0.5
    assert (memory.limit_bytes, memory.used_bytes) == (1 << 30, 4096)


def test_no_limit_is_none(tmp_path):
    root = plant(
        tmp_path,
        {
            "proc/self/cgroup": "0::/../outside\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory",
            "sys/fs/cgroup/cpu.max": "max 100000",
            "sys/fs/cgroup/memory.max": "max",
        },
    )
    assert read_cpu(root).quota is None
    assert read_memory(root)[0].limit_bytes is None


def test_numa_nodes_in_order(tmp_path):
    nodes = read_numa(plant(tmp_path, TWO_SOCKETS))
    assert [(node.node, node.cpus, node.memory_bytes) for node in nodes] == [
        (0, [0, 1], 512 << 20),
        (1, [2, 3], 512 << 20),
    ]


def test_network_ports(tmp_path):
    root = plant(tmp_path, TWO_SOCKETS)
    down, eth0 = read_nics(root)
    assert (down.name, down.up, down.speed_bits_per_s) == ("down0", False, None)
    assert (eth0.up, eth0.speed_bits_per_s, eth0.mtu, eth0.numa_node) == (True, 10**11, 9000, 1)
    (port,) = read_fabrics(root)
    assert (port.device, port.port, port.link_layer) == ("mlx5_0", 1, "InfiniBand")
    assert (port.active, port.rate_bits_per_s, port.numa_node) == (True, 400 * 10**9, None)


def test_kernel_switches(tmp_path):
    limits = read_limits(plant(tmp_path, TWO_SOCKETS))
    assert limits.numa_balancing is True
    assert limits.profiling_admin_only is True


def test_driver_version_of_both_kernel_modules(tmp_path):
    assert read_versions(plant(tmp_path / "open", TWO_SOCKETS)).driver == "580.65.06"
    closed = (
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version:\n"
    )
    other = plant(tmp_path / "closed", {"proc/driver/nvidia/version": closed})
    assert read_versions(other).driver == "535.104.05"


def test_containers_by_their_marks(tmp_path):
    assert read_container(tmp_path, {}) is None
    assert read_container(tmp_path, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "kubernetes"
    pods = plant(tmp_path / "pods", {"proc/1/cgroup": "0::/kubepods/besteffort/pod1\n"})
    assert read_container(pods, {}) == "kubernetes"
    assert read_container(plant(tmp_path / "d", {".dockerenv": ""}), {}) == "docker"
    assert read_container(plant(tmp_path / "p", {"run/.containerenv": ""}), {}) == "podman"


def test_an_empty_root_is_a_machine_of_unknowns(tmp_path):
    machine = probe(tmp_path, environment={"CAIRN_CACHE": str(tmp_path)})
    assert machine.gpus == machine.nics == machine.numa == machine.fabrics == []
    assert machine.cpu.quota is None
    assert machine.limits.numa_balancing is None


def test_this_machine_survives_json(tmp_path):
    machine = probe()
    assert machine.versions.torch is not None
    assert machine.memory.total_bytes > 0
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


@given(dictionaries(sampled_from(sorted(TWO_SOCKETS)), text(max_size=40), max_size=12))
def test_no_content_makes_the_probe_fall(tmp_path_factory, files):
    root = plant(tmp_path_factory.mktemp("root"), {k: v for k, v in files.items() if "\0" not in v})
    read_cpu(root), read_memory(root), read_numa(root), read_limits(root)
    read_nics(root), read_fabrics(root), read_versions(root), read_filesystem(root, root)


def test_probing_imports_neither_torch_nor_triton():
    loaded = (
        "import sys; from cairn.hw.probe import probe; from cairn.hw import roofline, datasheet\n"
    )
    done = _python(loaded + "probe(); print(sorted({'torch', 'triton'} & set(sys.modules)))")
    assert done == "[]"


def test_probe_without_psutil_and_nvml(tmp_path):
    blocked = "import sys; sys.modules['psutil'] = sys.modules['pynvml'] = None\n"
    known = _python(blocked + "from cairn.hw.probe import probe; print(probe().memory.total_bytes)")
    assert int(known) > 0
    ask = (
        "import msgspec, pathlib; from cairn.hw.host import read_memory\n"
        f"answer = read_memory(pathlib.Path({str(tmp_path)!r}))\n"
        "print(msgspec.json.encode(answer).decode())"
    )
    memory, notes = msgspec.json.decode(_python(blocked + ask), type=tuple[HostMemory, list[str]])
    assert memory.total_bytes is None
    assert "psutil is not installed" in notes[0]


def test_where_the_caches_are():
    home = Path.home()
    assert cache_folder({}) == home / ".cache/cairn"
    assert cache_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/cairn")
    assert cache_folder({"XDG_CACHE_HOME": "/x", "CAIRN_CACHE": "/y"}) == Path("/y")
    assert hub_folder({}) == home / ".cache/huggingface/hub"
    assert hub_folder({"HF_HOME": "/models"}) == Path("/models/hub")
    assert hub_folder({"HF_HOME": "/models", "HF_HUB_CACHE": "/hub"}) == Path("/hub")


def test_filesystem_of_a_folder_that_does_not_exist_yet(tmp_path):
    mounts = f"/dev/a / ext4 rw 0 0\nnfs:/x {tmp_path} nfs4 rw 0 0\n"
    root = plant(tmp_path / "root", {"proc/self/mounts": mounts})
    found = read_filesystem(tmp_path / "not" / "yet", root)
    assert (found.mount, found.kind) == (str(tmp_path), "nfs4")
    assert 0 <= found.free_bytes <= found.total_bytes


def test_a_user_without_a_home_and_a_disk_that_does_not_answer(monkeypatch, tmp_path):
    def refuse(*_):
        raise RuntimeError("could not determine home directory")

    monkeypatch.setattr(Path, "home", refuse)
    assert cache_folder({}).name == "cairn"

    def stale(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("os.statvfs", stale)
    assert read_filesystem(tmp_path) == Filesystem(path=str(tmp_path))


def test_small_parsers():
    assert parse_range_list("0-3,8") == [0, 1, 2, 3, 8]
    assert parse_range_list("") == []
    assert parse_size("32K") == 32 << 10
    assert parse_size("1024 kB") == 1 << 20
    assert parse_size("nonsense") is None
    assert parse_version("2.13.0+cpu") == (2, 13, 0)
    assert parse_version("unknown") == ()


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
