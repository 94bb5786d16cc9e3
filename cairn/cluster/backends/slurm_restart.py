"""Restart decision of a failed Slurm job, made by its batch script: requeue without the bad node, or fail.

    python -m cairn.cluster.backends.slurm_restart RUN
    n2,n7                     on stdout: nodes to leave out        exit status 3: it would fail the same way again

RUN/failures has what the ranks wrote about their ends. Other jobs hear of such nodes through the logs (`cordon_list`).
"""

import os
import re
import subprocess
import sys
from pathlib import Path

from cairn.core.rank_failure import RankFailure, first_of, found_in, summary
from cairn.core.restart_policy import POLICIES

NEVER = 3


def first_failure(run: Path) -> RankFailure | None:
    failures = [
        failure
        for path in sorted(run.glob("failures/*.json"))
        for failure in found_in([path.read_text(encoding="utf-8")])
    ]
    return first_of(failures)


def main(run: Path) -> int:
    failure = first_failure(run)
    if failure is None:
        return 0
    policy = POLICIES[failure.verdict.cause]
    if policy.again == "never":
        print(f"not tried again: {summary(failure)}", file=sys.stderr)
        return NEVER
    if policy.cordon and failure.blamed in _allocated():
        print(f"without {failure.blamed} from now on: {summary(failure)}", file=sys.stderr)
        print(",".join([*_left_out(), failure.blamed]))
    return 0


def _allocated() -> list[str]:
    """The nodes of this job; Slurm would refuse to leave out a name that it does not know."""
    return _asked("show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()


def _left_out() -> list[str]:
    """Already: the new list takes the place of the old one."""
    listing = _asked("show", "job", os.environ.get("SLURM_JOB_ID", ""))
    match = re.search(r"\bExcNodeList=([^\s(]+)", listing)
    return [match[1]] if match else []


def _asked(*words: str) -> str:
    return subprocess.run(["scontrol", *words], capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
