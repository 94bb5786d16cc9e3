"""machine.json survives a round trip, knows when it is stale, and has a way out when it is bad."""

import msgspec
import pytest
from synthetic_hosts import healthy_machine, some_ceilings

from cairn.core.errors import HardwareError
from cairn.hw.ceilings import (
    Measured,
    duration,
    identify,
    load,
    machine_file,
    rate,
    save,
    staleness,
)
from cairn.hw.timing import CallTiming

TIMING = CallTiming(median_s=2.0, p10_s=1.0, p90_s=4.0, runs=7)


def test_a_rate_is_work_over_time_and_slow_runs_are_low():
    found = rate(8.0, "B/s", TIMING, "by hand")
    assert found == Measured(value=4.0, unit="B/s", low=2.0, high=8.0, runs=7, how="by hand")


def test_a_duration_keeps_its_order():
    found = duration(TIMING, "by hand")
    assert (found.low, found.value, found.high, found.unit) == (1.0, 2.0, 4.0, "s")


def test_round_trip(tmp_path):
    path = tmp_path / "new" / "folder" / "machine.json"
    save(some_ceilings(), path)
    assert load(path) == some_ceilings()
    assert [file.name for file in path.parent.iterdir()] == ["machine.json"]


def test_the_file_is_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    assert machine_file() == tmp_path / "machine.json"
    save(some_ceilings(), machine_file())
    assert load() == some_ceilings()


def test_no_file_is_an_error_with_a_way_out(tmp_path):
    with pytest.raises(HardwareError, match="does not exist") as caught:
        load(tmp_path / "machine.json")
    assert caught.value.hint == "run `cairn calibrate`"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"{", "damaged"),
        (b'{"measured_at": 3}', "damaged"),
        (msgspec.json.encode(some_ceilings(schema=99)), "schema 99"),
    ],
)
def test_bad_files(tmp_path, content, complaint):
    path = tmp_path / "machine.json"
    path.write_bytes(content)
    with pytest.raises(HardwareError, match=complaint) as caught:
        load(path)
    assert "cairn calibrate" in caught.value.hint


def test_a_folder_in_its_place(tmp_path):
    with pytest.raises(HardwareError, match="cannot read"):
        load(tmp_path)


def test_the_same_machine_is_fresh():
    assert identify(healthy_machine()) == some_ceilings().identity
    assert staleness(some_ceilings(), healthy_machine()) == []


def replaced(**changes):
    return msgspec.structs.replace(healthy_machine(), **changes)


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (healthy_machine(gpus=0), "GPUs: NVIDIA H200 when measured, none now"),
        (healthy_machine(gpus=2), "GPUs: NVIDIA H200 when measured, NVIDIA H200, NVIDIA H200 now"),
        (
            replaced(versions=msgspec.structs.replace(healthy_machine().versions, driver="600.1")),
            "GPU driver: 580.65.06 when measured, 600.1 now",
        ),
        (
            replaced(versions=msgspec.structs.replace(healthy_machine().versions, torch="2.13.0")),
            "torch: 2.11.0+cu130 when measured, 2.13.0 now",
        ),
        (
            replaced(cpu=msgspec.structs.replace(healthy_machine().cpu, usable_threads=8)),
            "CPU threads: 64 when measured, 8 now",
        ),
        (
            replaced(cpu=msgspec.structs.replace(healthy_machine().cpu, model="Other")),
            "CPU: Imaginary Xeon 9000 when measured, Other now",
        ),
    ],
)
def test_what_makes_it_stale(machine, reason):
    assert staleness(some_ceilings(), machine) == [reason]
