"""`cairn doctor` prints one document or lines, and its exit status says whether something fails."""

import json
import subprocess
import sys

import pytest

from cairn.cli import doctor
from cairn.core.errors import UsageError
from cairn.hw import diagnose as diagnosis
from cairn.hw import evidence as evidence_module
from cairn.hw.evidence import HardwareEvidence
from cairn.hw.findings import fail, ok, warn
from cairn.hw.machine import Machine, Versions


@pytest.fixture
def findings(monkeypatch):
    """Give the doctor these findings instead of a machine's."""

    def give(**checks):
        machine = Machine(versions=Versions(python="3.11.0"))
        evidence = HardwareEvidence(machine=machine, own_pid=1, is_root=False)
        monkeypatch.setattr(evidence_module, "collect", lambda: evidence)
        table = {name: lambda _, finding=finding: finding for name, finding in checks.items()}
        monkeypatch.setattr(diagnosis, "CHECKS", table)

    return give


@pytest.mark.parametrize(
    ("finding", "status", "code"),
    [
        (ok("fine"), "ok", 0),
        (warn("hm", "look"), "warn", 0),
        (fail("broken", "mend [it]"), "fail", 1),
    ],
)
def test_json_is_one_document(findings, capsys, finding, status, code):
    findings(first=ok("good"), second=finding)
    assert doctor.run(["--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert set(document) == {"status", "checks", "machine"}
    assert document["status"] == status
    assert document["checks"][1] == {
        "name": "second",
        "status": finding.status,
        "why": finding.why,
        "fix": finding.fix,
    }
    assert document["machine"]["versions"]["python"] == "3.11.0"


def test_lines_for_a_person(findings, capsys):
    findings(python=ok("3.11"), torch=fail("gone [away]", "pip install torch"))
    assert doctor.run([]) == 1
    out = capsys.readouterr().out
    assert out.splitlines() == [
        "✓ python  3.11",
        "✗ torch   gone [away]",
        "          fix: pip install torch",
        "",
        "1 ok, 0 to look at, 1 failed",
    ]


def test_a_check_that_raises_does_not_stop_the_doctor(findings, capsys, monkeypatch):
    findings()
    monkeypatch.setattr(
        diagnosis, "CHECKS", {"bad": lambda evidence: 1 / 0, "good": lambda _: ok("x")}
    )
    assert doctor.run(["--json"]) == 1
    bad, good = json.loads(capsys.readouterr().out)["checks"]
    assert "ZeroDivisionError" in bad["why"]
    assert good["status"] == "ok"


def test_this_machine(capsys):
    assert doctor.run(["--json"]) in (0, 1)
    document = json.loads(capsys.readouterr().out)
    assert document["machine"]["cpu"]["threads"] > 0
    assert {"python", "torch", "gpu"} <= {check["name"] for check in document["checks"]}


def test_a_bare_gpu_host_has_warnings_and_no_crash():
    """Only torch, numpy, msgspec, tyro and rich are certain to be there."""
    absent = ("psutil", "pynvml", "gguf", "huggingface_hub", "jinja2")
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from cairn.cli.doctor import run; sys.exit(run(['--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    packages = {check["name"]: check for check in json.loads(done.stdout)["checks"]}["packages"]
    assert packages["status"] == "warn"
    assert packages["fix"] == "pip install gguf huggingface_hub jinja2"


def test_an_unknown_flag_is_a_usage_error():
    with pytest.raises(UsageError):
        doctor.run(["--jsn"])
