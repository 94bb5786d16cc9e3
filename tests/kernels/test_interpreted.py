"""Numerics of every Triton kernel on the CPU: each `interpreted_*.py` here runs in a process of its own.

The interpreter changes triton.language for good and a kernel gone wrong can end its process, so neither may happen in
the process of the suite. The processes are forks of one that has imported torch and Triton.
"""

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("interpreted_*.py"))
TIMEOUT_S = 240


@pytest.fixture(scope="module")
def host() -> Iterator["subprocess.Popen[str]"]:
    # NumPy's threads only get into each other's way on tiles of this size.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / "fork_host.py")],
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


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str, host: "subprocess.Popen[str]"):
    host.stdin.write(f"{FOLDER / name}.py\n")
    host.stdin.flush()
    status, _, output = answer(host, TIMEOUT_S).strip().partition(" ")
    text = Path(output).read_text(encoding="utf-8")
    Path(output).unlink()
    assert status == "0", f"{name} left with {status}:\n{text}"
