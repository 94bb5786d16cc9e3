"""Every verdict of the doctor, on machines that have just that illness."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from synthetic_hosts import GIBI, healthy_gpu, healthy_machine, plant, some_ceilings

from cairn.hw import ceilings, evidence
from cairn.hw.diagnose import CHECKS, diagnose, overall
from cairn.hw.evidence import (
    OPTIONAL_PACKAGES,
    CalibrationState,
    HardwareEvidence,
    WritableFolder,
    collect,
    read_calibration,
    try_import,
    try_matmul,
)
from cairn.hw.findings import HardwareFinding, HardwareVerdict, ok
from cairn.hw.machine import Ecc, FabricPort, Filesystem, GpuProcess, NumaNode, PcieLink
from cairn.train.config import Log

replace = msgspec.structs.replace


def place(free_bytes=500 * GIBI, writable=True):
    filesystem = Filesystem(path="/cache", kind="ext4", free_bytes=free_bytes)
    return WritableFolder(filesystem=filesystem, writable=writable)


def healthy(gpus=1, **changes):
    base = HardwareEvidence(
        machine=healthy_machine(gpus),
        own_pid=100,
        is_root=False,
        torch_gpus=gpus,
        cairn_cache=place(),
        hub_cache=place(),
        calibration=CalibrationState(path="/cache/machine.json", measured_at="2026-01-01"),
    )
    return replace(base, **changes)


def with_machine(evidence=None, **changes):
    evidence = evidence or healthy()
    return replace(evidence, machine=replace(evidence.machine, **changes))


def with_versions(**changes):
    return with_machine(versions=replace(healthy_machine().versions, **changes))


def with_gpu(**changes):
    return with_machine(gpus=[replace(healthy_gpu(), **changes)])


def with_cpu(**changes):
    return with_machine(cpu=replace(healthy_machine().cpu, **changes))


def with_memory(**changes):
    return with_machine(memory=replace(healthy_machine().memory, **changes))


def with_limits(evidence=None, **changes):
    return with_machine(evidence, limits=replace(healthy_machine().limits, **changes))


TWO_NODES = [NumaNode(node=0), NumaNode(node=1)]
FABRIC = [FabricPort(device="mlx5_0", port=1)]

ILLNESSES = [
    ("python", "fail", "3.9.1", with_versions(python="3.9.1")),
    ("torch", "fail", "not installed", with_versions(torch=None)),
    ("torch", "fail", "2.4.0 is older than 2.11", with_versions(torch="2.4.0")),
    ("torch", "fail", "OSError: libcudart", healthy(torch_problem="OSError: libcudart")),
    (
        "cuda",
        "fail",
        "built without CUDA",
        replace(with_versions(torch_cuda=None, torch="2.13.0+cpu"), torch_gpus=0),
    ),
    ("cuda", "fail", "CUDA 13.0, the driver runs 12.4", with_versions(driver_cuda="12.4")),
    (
        "cuda",
        "warn",
        "CUDA 12.8, the driver runs 12.4",
        with_versions(torch_cuda="12.8", driver_cuda="12.4"),
    ),
    ("cuda", "warn", "does not say", with_versions(driver_cuda=None)),
    ("gpu", "warn", "no GPU", healthy(gpus=0)),
    ("gpu", "fail", "torch can use 0", healthy(torch_gpus=0)),
    ("gpu", "warn", "torch can use 1", healthy(gpus=2, torch_gpus=1)),
    ("gpu", "warn", "hidden by", with_machine(healthy(torch_gpus=0), visible_gpus="")),
    ("matmul", "fail", "numbers", healthy(matmul_problem="cuda:0: 3 of 4096 numbers are wrong")),
    ("triton", "fail", "not installed", replace(with_versions(triton=None), triton_problem="no")),
    ("triton", "fail", "does not import: boom", healthy(triton_problem="boom")),
    ("ecc", "fail", "no spare", with_gpu(ecc=Ecc(enabled=True, remap_failed=True))),
    ("ecc", "warn", "GPU 0: 4", with_gpu(ecc=Ecc(enabled=True, uncorrected=4))),
    ("ecc", "warn", "uncorrected", with_gpu(ecc=Ecc(enabled=True, remap_pending=True))),
    ("pcie", "warn", "x4 of x16", with_gpu(pcie=PcieLink(width=4, max_width=16))),
    ("clocks", "warn", "thermal", with_gpu(slowdowns=["hardware thermal slowdown"])),
    (
        "gpu memory",
        "warn",
        "process 7 (2 GiB)",
        with_gpu(processes=[GpuProcess(pid=7, memory_bytes=2 * GIBI)]),
    ),
    ("gpu memory", "warn", "not visible", with_gpu(memory_used_bytes=60 * GIBI)),
    ("p2p", "warn", "0-1", healthy(gpus=2, pairs_without_p2p=[(0, 1), (1, 0)])),
    ("counters", "warn", "only root", with_limits(profiling_admin_only=True)),
    ("container", "warn", "gVisor", with_machine(container="docker", kernel="4.4.0")),
    ("container", "warn", "gVisor", with_machine(container=None, kernel="4.19.0-gvisor")),
    ("cpu", "warn", "64 threads are visible, the container grants 2.5", with_cpu(quota=2.5)),
    (
        "numa",
        "warn",
        "2 nodes",
        with_limits(with_machine(numa=TWO_NODES), numa_balancing=True),
    ),
    ("memory", "warn", "limit of the container", with_memory(limit_bytes=2 * GIBI)),
    ("memory", "warn", "4 GiB", with_memory(total_bytes=4 * GIBI)),
    ("memory", "warn", "unknown", with_memory(total_bytes=None)),
    ("shm", "warn", "64 MiB", with_memory(shm_bytes=64 << 20)),
    ("open files", "warn", "1024", with_limits(open_files=1024)),
    (
        "locked memory",
        "warn",
        "8 MiB",
        with_limits(with_machine(fabrics=FABRIC), locked_memory_bytes=8 << 20),
    ),
    (
        "transfer",
        "warn",
        "mlx5_0 could do RDMA, but NIXL is not installed",
        with_machine(fabrics=[FabricPort(device="mlx5_0", port=1, active=True)]),
    ),
    ("model cache", "warn", "5 GiB free", healthy(hub_cache=place(5 * GIBI))),
    ("model cache", "warn", "cannot be written", healthy(hub_cache=place(writable=False))),
    ("cairn cache", "warn", "10 MiB free", healthy(cairn_cache=place(10 << 20))),
    ("cairn cache", "fail", "cannot be written", healthy(cairn_cache=place(writable=False))),
    (
        "calibration",
        "warn",
        "does not exist",
        healthy(calibration=CalibrationState(path="m", problem="m does not exist")),
    ),
    (
        "calibration",
        "warn",
        "stale: torch: 1 when",
        healthy(calibration=CalibrationState(path="m", stale=["torch: 1 when measured, 2 now"])),
    ),
    ("packages", "warn", "gguf, jinja2", healthy(missing_packages=["gguf", "jinja2"])),
    ("readings", "warn", "nvidia-ml-py", with_machine(notes=["nvidia-ml-py is not installed"])),
]


@pytest.mark.parametrize(("name", "status", "why", "evidence"), ILLNESSES)
def test_illness(name, status, why, evidence):
    verdict = {verdict.name: verdict for verdict in diagnose(evidence)}[name]
    assert verdict.status == status
    assert why in verdict.why
    assert verdict.fix


def test_every_package_that_a_flag_or_an_extra_needs_is_known():
    """Else the doctor says that all are installed, and the flag that they are not."""
    pyproject = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(pyproject.read_text())["project"]["optional-dependencies"]
    names = {
        re.split("[>=]", package)[0]
        for extra, packages in extras.items()
        if extra not in ("dev", "docs", "nixl")  # NIXL has a check of its own
        for package in packages
    }
    sinks = {field.name for field in msgspec.structs.fields(Log)} - {"every"}
    assert set(OPTIONAL_PACKAGES) == names | sinks
    absent = {name: use for name, (module, use) in OPTIONAL_PACKAGES.items() if name in sinks}
    (verdict,) = (
        one for one in diagnose(healthy(missing_optional=absent)) if one.name == "packages"
    )
    assert verdict.status == "ok"
    assert all(name in verdict.why for name in sinks)


def test_missing_packages_are_found(monkeypatch):
    gone = {"no-such": ("no_such", "this"), "no-such-part": ("no.such.part", "that")}
    monkeypatch.setattr(evidence, "OPTIONAL_PACKAGES", gone | {"torch": ("torch", "all")})
    assert evidence.missing_optional() == {"no-such": "this", "no-such-part": "that"}


def test_every_check_has_an_illness():
    assert {name for name, *_ in ILLNESSES} == set(CHECKS)


@pytest.mark.parametrize("gpus", [1, 8])
def test_a_healthy_machine_has_nothing_to_do(gpus):
    verdicts = diagnose(healthy(gpus))
    assert overall(verdicts) == "ok"
    assert all(verdict.fix is None for verdict in verdicts)


def test_without_a_gpu_there_is_one_remark_and_no_gpu_question():
    verdicts = diagnose(healthy(gpus=0, triton_problem="No module named 'triton'"))
    assert [verdict.name for verdict in verdicts if verdict.status != "ok"] == ["gpu"]
    assert not {"cuda", "triton", "ecc", "pcie", "clocks", "gpu memory", "p2p", "counters"} & {
        verdict.name for verdict in verdicts
    }


def test_another_vendors_gpu_is_not_a_missing_cuda():
    evidence = replace(with_versions(torch_cuda=None), torch_gpus=1)
    assert "cuda" not in {verdict.name for verdict in diagnose(evidence)}


@pytest.mark.parametrize(
    ("name", "evidence", "why"),
    [
        ("gpu", with_machine(healthy(gpus=8, torch_gpus=2), visible_gpus="0,1"), "can use 2"),
        ("gpu", with_gpu(mig=True), "slice"),
        (
            "gpu",
            replace(with_machine(gpus=[replace(healthy_gpu(), mig=True)] * 8), torch_gpus=1),
            "MIG is on",  # a process sees one slice, however many cards there are
        ),
        ("ecc", with_gpu(ecc=Ecc(enabled=True, remapped_rows=2)), "2 rows were replaced"),
        ("gpu memory", with_gpu(processes=[GpuProcess(pid=100)]), "no other process"),
        ("counters", with_limits(healthy(is_root=True), profiling_admin_only=True), "may read"),
        ("locked memory", with_limits(locked_memory_bytes=8 << 20), "there is none"),
        ("open files", with_limits(open_files="unlimited"), "unlimited"),
        ("numa", with_limits(with_machine(numa=TWO_NODES), numa_balancing=False), "balancing off"),
        ("cpu", with_cpu(quota=64.0), "64 threads"),
        ("p2p", healthy(gpus=2), "all 2 GPUs"),
        ("cuda", with_versions(driver_cuda="13.2"), "runs 13.2"),
    ],
)
def test_what_is_all_right(name, evidence, why):
    verdict = {verdict.name: verdict for verdict in diagnose(evidence)}[name]
    assert (verdict.status, verdict.fix) == ("ok", None)
    assert why in verdict.why


def test_a_check_that_raises_is_a_failure_and_the_rest_goes_on():
    def broken(evidence):
        raise KeyError("surprise")

    verdicts = diagnose(healthy(), {"broken": broken, "fine": lambda evidence: ok("yes")})
    assert [verdict.status for verdict in verdicts] == ["fail", "ok"]
    assert "KeyError: 'surprise'" in verdicts[0].why


def test_a_question_that_does_not_arise_is_left_out():
    assert diagnose(healthy(), {"silent": lambda evidence: None}) == []


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [([], "ok"), (["ok"], "ok"), (["ok", "warn"], "warn"), (["warn", "fail", "ok"], "fail")],
)
def test_the_worst_counts(statuses, expected):
    verdicts = [HardwareVerdict(name="x", status=status, why="", fix=None) for status in statuses]
    assert overall(verdicts) == expected


def test_findings_carry_a_fix_only_when_something_is_wrong():
    assert ok("fine") == HardwareFinding("ok", "fine", None)


def test_a_package_that_does_not_import_gives_the_reason(tmp_path, monkeypatch):
    plant(tmp_path, {"torch_of_straw.py": "raise OSError('libcuda.so.1: cannot open')\n"})
    monkeypatch.syspath_prepend(tmp_path)
    assert try_import("torch_of_straw") == "OSError: libcuda.so.1: cannot open"
    assert try_import("no_such_module").startswith("ModuleNotFoundError")
    assert try_import("msgspec") is None


def test_the_product_is_really_compared(monkeypatch):
    import torch

    assert try_matmul(gpus=0) is None
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self + 1)
    assert try_matmul(gpus=0) == "cpu: 4096 of 4096 numbers of a small product are wrong"


def test_reading_the_calibration(tmp_path):
    path = tmp_path / "machine.json"
    assert "does not exist" in read_calibration(path, healthy_machine()).problem
    ceilings.save(some_ceilings(), path)
    fresh = read_calibration(path, healthy_machine())
    assert (fresh.problem, fresh.stale) == (None, [])
    assert read_calibration(path, healthy_machine(gpus=2)).stale


def test_collecting_here_gives_evidence_that_can_be_judged(tmp_path):
    evidence = collect({"CAIRN_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)})
    assert evidence.torch_problem is None
    assert evidence.matmul_problem is None
    assert evidence.cairn_cache.writable
    assert evidence.calibration.problem is not None
    verdicts = diagnose(evidence)
    assert {"python", "torch", "gpu", "matmul", "cpu", "memory"} <= {v.name for v in verdicts}
    assert all(verdict.why for verdict in verdicts)
    assert not [verdict for verdict in verdicts if "check itself failed" in verdict.why]


@pytest.mark.gpu
def test_every_gpu_computes_right():
    import torch

    assert try_matmul(torch.cuda.device_count()) is None
