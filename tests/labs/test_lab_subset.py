"""A dozen and a few quick labs of every area through the real command, on a machine whose machine.json is broken."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cairn.hw.ceilings import load
from cairn.labs import record
from cairn.labs.catalogue import all_labs
from cairn.labs.entry import CheckLine, Entry
from cairn.labs.lab import AREAS

# Whichever of them comes first waits for the labs.
pytestmark = pytest.mark.timeout(240)

SUBSET = (
    "roofline", "systolic-array", "allocator", "autograd-graph", "ring-against-tree", "rs-plus-ag",
    "pipeline-bubbles", "ddp-big-batch", "continuous-batching", "paging-waste", "gang-deadlock", "young-daly",
    "page-fault", "syscall", "attention-from-scratch", "device-manager",
)  # fmt: skip

# Nothing in these is a matter of speed: they count, simulate or compare numbers, so they hold on any machine.
COUNTED = (
    "systolic-array",
    "autograd-graph",
    "ring-against-tree",
    "ddp-big-batch",
    "paging-waste",
    "gang-deadlock",
    "device-manager",
)
MOST_OFF = 3  # of those that measure time, on a machine that does something else as well


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One command for all of them; what it printed, and where it left its files."""
    folder = tmp_path_factory.mktemp("labs")
    environment = {
        **os.environ,
        "CAIRN_CACHE": str(folder),
        "CAIRN_DATA": str(folder),
        "TMPDIR": str(folder / "tmp"),
    }
    (folder / "tmp").mkdir()
    (folder / "machine.json").write_text('{"schema": 1, "measured_at": "20')
    command = [sys.executable, "-m", "cairn", "lab", "run", *SUBSET, "--quick", "--json"]
    done = subprocess.run(
        [*command, "--html", str(folder / "out.html")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=230,
        check=False,
    )
    return done, folder


def test_all_come_to_a_verdict(ran):
    done, _ = ran
    assert done.returncode == 0, done.stderr[-3000:]
    runs = json.loads(done.stdout)["runs"]
    assert [run["lab"] for run in runs] == list(SUBSET)
    status = {run["lab"]: run["status"] for run in runs}
    assert {lab: status[lab] for lab in COUNTED} == dict.fromkeys(COUNTED, "held")
    assert set(status.values()) <= {"held", "off", "busy"}
    assert [*status.values()].count("off") <= MOST_OFF, status
    assert {run["area"] for run in runs} == set(AREAS)
    for run in runs:
        assert run["checks"], run["lab"]
        assert all(check["what"]["en"] and check["what"]["zh"] for check in run["checks"])
        assert len(run["about"]["questions"]) == 3


def test_what_is_exact_holds_on_any_machine(ran):
    """Bytes, counts and equalities: a check without a tolerance is no matter of speed."""
    runs = json.loads(ran[0].stdout)["runs"]
    broken = {
        (run["lab"], check["what"]["en"]): (check["predicted"], check["measured"])
        for run in runs
        for check in run["checks"]
        if check["kind"] == "near" and check["within"] == 0 and not check["held"]
    }
    assert broken == {}


def test_the_page_has_them_all(ran):
    page = (ran[1] / "out.html").read_text(encoding="utf-8")
    for name in SUBSET:
        assert f'id="{name}"' in page
        assert all_labs()[name].title.zh in page


def test_the_record_has_them_all(ran):
    found = record.read(ran[1] / record.FILE)
    assert found.trouble == []
    assert [entry.lab for entry in found.entries] == list(SUBSET)
    assert all(isinstance(entry, Entry) for entry in found.entries)
    assert all(isinstance(check, CheckLine) for one in found.entries for check in one.checks)


def test_the_broken_machine_file_was_rebuilt_and_said(ran):
    done, folder = ran
    assert f"{folder / 'machine.json'} is damaged" in done.stderr
    assert load(folder / "machine.json").quick


def test_nothing_is_left_behind(ran):
    assert [path.name for path in Path(ran[1] / "tmp").iterdir() if "lab" in path.name] == []
