"""Numerics of every Triton kernel on the CPU: each `interpreted_*.py` here runs in a process of its own.

The interpreter changes triton.language for good and a kernel gone wrong can end its process, so neither may happen in
the process of the suite.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(path.stem for path in FOLDER.glob("interpreted_*.py"))
TIMEOUT_S = 240


@pytest.mark.timeout(TIMEOUT_S + 20)
@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    # NumPy's threads only get into each other's way on tiles of this size.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [*command, str(FOLDER / f"{name}.py")],
        env=environment,
        cwd=FOLDER.parents[1],
        timeout=TIMEOUT_S,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{name} left with {done.returncode}:\n{done.stdout}"
