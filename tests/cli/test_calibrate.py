"""`cairn calibrate` writes machine.json and prints it, as a table or as one document."""

import io
import json
import subprocess
import sys

import msgspec
import pytest

from cairn.cli import calibrate as verb
from cairn.core.errors import HardwareError, UsageError
from cairn.hw import calibrate as calibration
from cairn.hw import ceilings as ceilings_module
from cairn.hw import probe as probe_module
from cairn.hw.ceilings import Ceilings, Identity, Measured, load
from cairn.hw.machine import Gpu, Machine, PcieLink, Versions

MACHINE = Machine(
    gpus=[
        Gpu(
            index=0,
            name="NVIDIA H200",
            source="nvml",
            pcie=PcieLink(max_generation=5, max_width=16),
        )
    ],
    versions=Versions(torch="2.11.0", driver="580.1"),
)


def measured(value, unit="B/s", spread=0.1):
    half = value * spread / 2
    return Measured(value=value, unit=unit, low=value - half, high=value + half, runs=9, how="x")


CEILINGS = Ceilings(
    measured_at="2026-01-01T00:00:00+00:00",
    quick=False,
    identity=Identity(cpu="X", threads=2, gpus=["NVIDIA H200"], driver="580.1", torch="2.11.0"),
    device="cuda:0",
    device_name="NVIDIA H200",
    copy=measured(4.2e12),
    matmul={"bf16": measured(7.9e14, "FLOP/s")},
    launch=measured(1.2e-5, "s"),
    host_to_device_pinned=measured(5.5e10),
    host_copy=measured(2e11),
    disk_write=measured(1e9, spread=0.9),
    absent={"matmul.fp8": "no unit", "matmul.int8": "no unit", "disk_read_cold": "tmpfs"},
)


@pytest.fixture(autouse=True)
def imagined(monkeypatch, tmp_path):
    """The verb, on a machine whose ceilings we know."""
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(probe_module, "probe", lambda: MACHINE)
    monkeypatch.setattr(
        calibration,
        "calibrate",
        lambda machine, quick, progress: msgspec.structs.replace(CEILINGS, quick=quick),
    )


def test_json_is_the_document_that_is_written(capsys, tmp_path):
    assert verb.run(["--json", "--quick"]) == 0
    out = capsys.readouterr().out
    assert msgspec.json.decode(out, type=Ceilings) == load(tmp_path / "cache" / "machine.json")
    assert json.loads(out)["quick"] is True


def test_out_goes_elsewhere(capsys, tmp_path):
    assert verb.run(["--out", str(tmp_path / "elsewhere.json")]) == 0
    assert load(tmp_path / "elsewhere.json") == CEILINGS
    assert not (tmp_path / "cache").exists()
    assert "elsewhere.json" in capsys.readouterr().err


def test_the_table_shows_the_share_of_the_datasheet(capsys):
    verb.run([])
    lines = capsys.readouterr().out.splitlines()
    row = {label: next(line for line in lines if label in line) for label in ("memory", "bf16")}
    assert "4.2 TB/s" in row["memory"]
    assert "4.8 TB/s" in row["memory"]
    assert "88%" in row["memory"]
    assert "790 TFLOP/s" in row["bf16"]
    assert "80%" in row["bf16"]
    assert any("12 us" in line for line in lines)
    assert "not measured: fp8 matmul, int8 matmul (no unit)" in lines
    assert "not measured: disk read (cold) (tmpfs)" in lines
    assert "wide spread: disk write + fsync; was something else running?" in lines


def test_rows_and_their_promises():
    rows = {row.label: row for row in verb.table_rows(CEILINGS, MACHINE)}
    assert rows["host to device (pinned)"].promised == pytest.approx(63e9, rel=1e-3)
    assert rows["host memory copy"].promised is None
    assert rows["host memory copy"].share is None
    assert "disk read (cold)" not in rows


def test_on_a_cpu_there_is_no_promise_and_no_double_row():
    cpu = msgspec.structs.replace(CEILINGS, device="cpu", device_name="Arm Neoverse N1")
    rows = {row.label: row for row in verb.table_rows(cpu, MACHINE)}
    assert "host memory copy" not in rows
    assert all(row.promised is None for row in rows.values())


def test_every_ceiling_has_a_label():
    fields = [
        field.name for field in msgspec.structs.fields(Ceilings) if field.type == Measured | None
    ]
    assert set(fields) == set(verb.LABELS)


def test_progress_is_drawn_only_for_a_person(monkeypatch):
    with verb.progress_bar() as progress:
        assert progress is None
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with verb.progress_bar() as progress:
        progress("bf16 matmul", 3, 12)
    assert "bf16 matmul" in terminal.getvalue()


def test_a_place_that_cannot_be_written_is_refused_before_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("measured"))
    with pytest.raises(HardwareError, match="it is a folder"):
        verb.run(["--out", str(tmp_path)])
    (tmp_path / "file").write_text("")
    with pytest.raises(HardwareError, match="not writable") as caught:
        verb.run(["--out", str(tmp_path / "file" / "machine.json")])
    assert "--out" in caught.value.hint


def test_a_write_that_fails_has_a_way_out(tmp_path):
    (tmp_path / "machine.json").mkdir()
    with pytest.raises(HardwareError, match="cannot write"):
        ceilings_module.save(CEILINGS, tmp_path / "machine.json")


def test_an_unknown_flag_is_a_usage_error():
    with pytest.raises(UsageError):
        verb.run(["--quik"])


@pytest.mark.parametrize("module", ["calibrate", "doctor"])
def test_the_verb_waits_for_torch_until_it_runs(module):
    code = f"import sys, cairn.cli.{module}; print('torch' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
