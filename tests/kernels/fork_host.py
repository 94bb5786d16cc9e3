"""Runs test files in Triton's interpreter, each in a fork of this process, which has imported what all of them need.

A name comes in on each line of standard input; a line with the exit status and the file with the output goes out.
"""

import os
import sys
import tempfile

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401

import cairn.kernels.interpret  # isort: skip
import cairn.kernels.accuracy  # noqa: F401

ALREADY_IMPORTED = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
OPTIONS = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", ALREADY_IMPORTED]


def run_forked(path: str) -> tuple[int, str]:
    """The exit status of pytest on this file (negative: of a signal), and where its output lies."""
    number, output = tempfile.mkstemp(prefix="interpreted-", suffix=".log")
    child = os.fork()
    if child == 0:
        os.dup2(number, 1)
        os.dup2(number, 2)
        status = pytest.main([*OPTIONS, path])
        sys.stdout.flush()
        os._exit(int(status))
    os.close(number)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), output


if __name__ == "__main__":
    for line in sys.stdin:
        status, output = run_forked(line.strip())
        print(status, output, flush=True)
