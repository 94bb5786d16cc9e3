"""The agent of a container: its exit status tells Kubernetes whether the program failed or the machine. A program.

    python -m cairn.cluster.pod_agent -- python -m torch.distributed.run ...       exit status 2: no restart helps

torch elastic leaves with 1 whatever has happened, and starts ranks again that will fail the same way. Elsewhere the
supervisor reads what ranks report about their ends (`failure_reports`); a pod has none, so its first process does.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cairn.cluster.failure_reports import FailureReports
from cairn.core.die_with_parent import die_with_parent

MISTAKE = 2  # the exit status with which `cairn` refuses what it was asked
POLL_S = 0.2
LAST_S = 15.0  # for an agent to end its ranks when nothing is tried any more


def run(argv: list[str], failures: Path) -> int:
    """The status of the agent, or MISTAKE as soon as a rank has failed for good."""
    env = {**os.environ, "CAIRN_JOB_FAILURES": str(failures)}
    agent = subprocess.Popen(argv, env=env, preexec_fn=die_with_parent)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: agent.send_signal(received))
    reports = FailureReports(failures)
    while True:
        status = agent.poll()  # first: what it wrote before it left is read below
        over = next((report.over for report in reports.new() if report.over), None)
        if over is not None:
            _end(agent)
            return MISTAKE
        if status is not None:
            return status if status >= 0 else 128 - status
        time.sleep(POLL_S)


def _end(agent: subprocess.Popen[bytes]) -> None:
    agent.terminate()
    try:
        agent.wait(LAST_S)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def main(argv: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="cairn-failures-") as folder:
        return run(argv[1:] if argv[:1] == ["--"] else argv, Path(folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
