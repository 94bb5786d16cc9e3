"""Calibration gathers what the steps find, and turns what they cannot do into reasons."""

import os
import subprocess
import sys

import msgspec
import pytest
from synthetic_hosts import healthy_machine, measured

from cairn.hw import calibrate as module
from cairn.hw.calibrate import QUICK, CalibrationStep, calibrate, gather, plan_steps, run_step
from cairn.hw.ceilings import Ceilings, Measured
from cairn.hw.cpu_types import multiplies
from cairn.hw.datasheet import DTYPES, find_chip
from cairn.hw.loopback import BLOCK_BYTES, travel
from cairn.hw.machine import Cpu, Machine
from cairn.hw.measure_device import Unmeasurable, make_product, matmul_rate
from cairn.hw.measure_host import DISK_KEYS, disk_rates, loopback_rates
from cairn.hw.probe import probe

TINY = msgspec.structs.replace(
    QUICK,
    budget_ms=5,
    host_bytes=4 << 20,
    device_bytes=1 << 30,  # several times the L2 of any GPU
    transfer_bytes=4 << 20,
    disk_bytes=4 << 20,
    echoes=20,
    loopback_bytes=16 << 20,
)


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(module, "QUICK", TINY)


def raising(error):
    def run():
        raise error

    return run


def test_every_field_has_a_step_and_every_step_a_field():
    steps = plan_steps("cuda:0", healthy_machine(), QUICK, folder=None)
    keys = {key for step in steps for key in step.keys}
    bookkeeping = {
        "schema",
        "measured_at",
        "quick",
        "identity",
        "device",
        "device_name",
        "absent",
        "busy",
    }
    fields = set(Ceilings.__struct_fields__) - bookkeeping - {"matmul"}
    assert keys == fields | {f"matmul.{dtype}" for dtype in DTYPES}


def test_on_a_cpu_the_host_is_not_measured_twice():
    steps = plan_steps("cpu", healthy_machine(), QUICK, folder=None)
    assert "host_copy" not in {key for step in steps for key in step.keys}
    found = gather({"copy": measured(1.0)}, healthy_machine(0), "cpu", "X", quick=True)
    assert found.host_copy == found.copy


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unmeasurable("no such unit"), "no such unit"),
        (RuntimeError("CUDA out of memory\nmore"), "RuntimeError: CUDA out of memory"),
        (PermissionError(13, "Permission denied"), "PermissionError: [Errno 13] Permission denied"),
    ],
)
def test_what_cannot_be_done_leaves_a_reason(error, reason):
    assert run_step(CalibrationStep("x", ("a", "b"), raising(error))) == {"a": reason, "b": reason}


def test_a_bug_is_not_a_reason():
    with pytest.raises(TypeError):
        run_step(CalibrationStep("x", ("a",), raising(TypeError("ours"))))


def test_gather_sorts_numbers_from_reasons():
    findings = {"copy": measured(1.0), "matmul.bf16": measured(2.0), "matmul.fp8": "no unit"}
    found = gather(findings, healthy_machine(), "cuda:0", "NVIDIA H200", quick=False)
    assert found.copy == measured(1.0)
    assert found.matmul == {"bf16": measured(2.0)}
    assert found.absent == {"matmul.fp8": "no unit"}
    assert found.host_copy is None


def test_a_gpu_that_torch_cannot_use_is_noted():
    found = gather({}, healthy_machine(), "cpu", "X", quick=True)
    assert "cannot use NVIDIA H200" in found.absent["gpu"]


@pytest.mark.usefixtures("tiny")
def test_the_whole_on_this_machine(tmp_path, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen = []
    small = Machine(cpu=Cpu(model="this CPU"), versions=probe().versions)
    ceilings = calibrate(
        small, quick=True, folder=tmp_path, progress=lambda *step: seen.append(step)
    )
    assert (ceilings.device, ceilings.device_name, ceilings.quick) == ("cpu", "this CPU", True)
    assert set(ceilings.matmul) == {"fp32"} | ({"bf16"} if multiplies("bf16") else set())
    assert {"matmul.fp8", "launch_in_graph", "host_to_device_pinned"} <= set(ceilings.absent)
    assert ceilings.copy.unit == "B/s"
    assert ceilings.launch.unit == "s"
    assert seen[0][1] == 0
    assert seen[-1][1] == seen[-1][2] == len(seen) - 1
    assert list(tmp_path.iterdir()) == []
    assert msgspec.json.decode(msgspec.json.encode(ceilings), type=Ceilings) == ceilings
    for value in map(ceilings.__getattribute__, ceilings.__struct_fields__):
        if isinstance(value, Measured):
            assert 0 < value.low <= value.value <= value.high
            assert value.runs > 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
def test_products_are_of_random_numbers(dtype):
    result = make_product("cpu", dtype, 32)()
    assert result.shape == (32, 32)
    assert result.unique().numel() > 100


def test_the_precision_setting_is_put_back():
    import torch

    before = torch.backends.cuda.matmul.fp32_precision
    matmul_rate("cpu", "fp32", budget_ms=1)
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_disk_in_memory_is_not_a_disk(monkeypatch, tmp_path):
    from cairn.hw import measure_host

    filesystem = measure_host.read_filesystem(tmp_path)
    for change, reason in (({"kind": "tmpfs"}, "in memory"), ({"free_bytes": 5}, "5 bytes free")):
        changed = msgspec.structs.replace(filesystem, **({"kind": "ext4"} | change))
        monkeypatch.setattr(measure_host, "read_filesystem", lambda folder, found=changed: found)
        findings = disk_rates(tmp_path, 1 << 20)
        assert set(findings) == set(DISK_KEYS)
        assert all(reason in str(value) for value in findings.values())


def test_disk_without_fadvise_leaves_only_the_cold_read_out(monkeypatch, tmp_path):
    from cairn.hw import measure_host

    changed = msgspec.structs.replace(measure_host.read_filesystem(tmp_path), kind="ext4")
    monkeypatch.setattr(measure_host, "read_filesystem", lambda folder: changed)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    findings = disk_rates(tmp_path / "not" / "yet", 4 << 20)
    assert isinstance(findings["disk_write"], Measured)
    assert isinstance(findings["disk_read_warm"], Measured)
    assert "posix_fadvise" in findings["disk_read_cold"]


def test_loopback_counts():
    trip = travel(rounds=5, size_bytes=4 * BLOCK_BYTES)
    assert len(trip.round_trips_s) == 5
    assert len(trip.blocks_s) == 3
    findings = loopback_rates(rounds=5, size_bytes=BLOCK_BYTES)
    assert findings["loopback_round_trip"].unit == "s"
    assert findings["loopback_throughput"].unit == "B/s"


def test_a_child_that_dies_is_an_error_and_not_a_hang(monkeypatch):
    monkeypatch.setattr("cairn.hw.loopback.PATIENCE_S", 1)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="timed out"):
        travel(rounds=1, size_bytes=1)


def test_ceilings_and_roofline_need_no_torch():
    code = (
        "import sys; sys.modules['torch'] = sys.modules['psutil'] = None\n"
        "import cairn.hw.ceilings, cairn.hw.roofline, cairn.hw.calibrate, cairn.hw.diagnose"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.gpu
@pytest.mark.usefixtures("tiny")
def test_the_whole_on_a_gpu(tmp_path):
    machine = probe()
    ceilings = calibrate(machine, quick=True, folder=tmp_path)
    assert ceilings.device == "cuda:0"
    assert {"fp32", "fp16"} <= set(ceilings.matmul)
    assert ceilings.launch_in_graph.value < ceilings.launch.value
    assert ceilings.host_copy is not None
    assert ceilings.host_to_device_pinned is not None
    for dtype in DTYPES:
        assert dtype in ceilings.matmul or f"matmul.{dtype}" in ceilings.absent
    chip, _ = find_chip(ceilings.device_name)
    if chip is not None:  # a ceiling above the datasheet means that we count wrongly
        assert ceilings.copy.value < 1.1 * chip.bytes_per_s
        for dtype, rate in ceilings.matmul.items():
            assert rate.value < 1.1 * chip.flops_per_s[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu_products_run_and_are_not_of_zeros(dtype):
    import torch

    from cairn.hw.measure_device import why_not

    reason = why_not("cuda:0", dtype)
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    result = make_product("cuda:0", dtype, 512)()
    assert result.shape == (512, 512)
    assert torch.isfinite(result.float()).all()
    assert result.float().std() > 1
