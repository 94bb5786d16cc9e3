"""Numerics of every Triton kernel on the CPU: each `interpreted_*.py` here runs in a process of its own.

The interpreter changes triton.language for good and a kernel gone wrong can end its process, so neither may happen in
the process of the suite. The processes are forks of one that has imported torch and Triton.

Minutes go into this, and what it computes depends on sources and versions alone. So a file is passed over if nothing
has changed of it, of what it imports and of the tools since it last was right; `interpreted_well.json` says when that
was, by fingerprint. `CAIRN_ALL_KERNELS=1` interprets all of them, and `CAIRN_RECORD_KERNELS=1` writes the file.
"""

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import source_closure
from source_closure import fingerprint

FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("interpreted_*.py"))
TIMEOUT_S = 240
HOST = FOLDER / "fork_host.py"
RECORD = FOLDER / "interpreted_well.json"
ALWAYS = "interpreted_interpreter"  # small: shows that the processes work at all


@pytest.fixture(scope="module")
def host() -> Iterator["subprocess.Popen[str]"]:
    # NumPy's threads only get into each other's way on tiles of this size.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    process = subprocess.Popen(
        [sys.executable, str(HOST)],
        env=environment,
        cwd=FOLDER.parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        yield process
        process.stdin.close()


def answer(host: "subprocess.Popen[str]", timeout_s: float) -> str:
    with selectors.DefaultSelector() as selector:
        selector.register(host.stdout, selectors.EVENT_READ)
        if not selector.select(timeout_s):
            os.killpg(host.pid, 9)
            pytest.fail(f"not done after {timeout_s} s")
    return host.stdout.readline()


def is_known(name: str) -> bool:
    return recorded().get(name) == fingerprint(FOLDER / f"{name}.py", HOST)


def recorded() -> dict[str, str]:
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def note(name: str) -> None:
    kept = {old: value for old, value in recorded().items() if old in FILES}
    kept[name] = fingerprint(FOLDER / f"{name}.py", HOST)
    RECORD.write_text(json.dumps(dict(sorted(kept.items())), indent=0) + "\n", encoding="utf-8")


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str, host: "subprocess.Popen[str]"):
    if name != ALWAYS and "CAIRN_ALL_KERNELS" not in os.environ and is_known(name):
        pytest.skip("nothing has changed since it was right")
    host.stdin.write(f"{FOLDER / name}.py\n")
    host.stdin.flush()
    status, _, output = answer(host, TIMEOUT_S).strip().partition(" ")
    text = Path(output).read_text(encoding="utf-8")
    Path(output).unlink()
    assert status == "0", f"{name} left with {status}:\n{text}"
    if "CAIRN_RECORD_KERNELS" in os.environ:
        note(name)


def test_a_change_in_what_a_file_imports_changes_its_fingerprint(monkeypatch):
    file = FOLDER / "interpreted_rmsnorm.py"
    files = source_closure.closure(file)
    assert {
        FOLDER.parents[1] / f"cairn/kernels/{name}.py" for name in ("norm/rmsnorm", "norm/rows")
    } <= files
    before = fingerprint(file)
    rest = files - {FOLDER.parents[1] / "cairn/kernels/norm/rows.py"}
    monkeypatch.setattr(source_closure, "closure", lambda path: rest)
    assert fingerprint(file) != before
