"""In a pod: a mistake of the program is told from bad luck by the exit status; a signal reaches the program."""

import os
import signal
import subprocess
import sys

import pytest

from cairn.cluster.pod_agent import MISTAKE

AGENT = [sys.executable, "-m", "cairn.cluster.pod_agent", "--"]
RANK = [sys.executable, "-m", "cairn.cluster.rank", "--", sys.executable, "-c"]
ENV = {**os.environ, "CAIRN_JOB_HEALTH": "off"}


def ended(argv):
    return subprocess.run([*AGENT, *argv], capture_output=True, text=True, timeout=120, env=ENV)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("print('well')", 0),
        ("import no_such_module", MISTAKE),
        ("raise SystemExit(9)", 9),  # nobody knows why: Kubernetes tries again
        ("import os; os.kill(os.getpid(), 9)", 128 + 9),
    ],
)
def test_the_status_says_whether_another_try_can_help(code, status):
    done = ended([*RANK, code])
    assert done.returncode == status, done.stderr


def test_torch_elastic_does_not_try_a_mistake_again():
    """By itself it would, and leave with 1."""
    elastic = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=5",
        "--no-python",
    ]
    done = ended([*elastic, *RANK, "import no_such_module"])
    assert done.returncode == MISTAKE, done.stderr


def test_a_signal_reaches_the_program():
    code = "import signal, sys; signal.signal(15, lambda *_: sys.exit(0)); print('up', flush=True); signal.pause()"
    with subprocess.Popen([*AGENT, *RANK, code], stdout=subprocess.PIPE, text=True, env=ENV) as pod:
        assert pod.stdout is not None
        assert pod.stdout.readline() == "r0| up\n"
        pod.send_signal(signal.SIGTERM)
        assert pod.wait(60) == 0
