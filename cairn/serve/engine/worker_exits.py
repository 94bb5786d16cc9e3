"""Workers that have exited, before they were ready or later: which of them is to blame, and what to raise."""

import signal
import time

from cairn.serve.engine.messages import EngineFailed, Failure, Ready
from cairn.serve.engine.pending_calls import as_raised
from cairn.serve.engine.process import WorkerGroup

POLL_S = 0.1  # how soon the end of a process is noticed
LAST_WORDS_S = 0.2  # for what a worker said just before it ended


def to_blame(fallen: list[tuple[int, int]]) -> tuple[int, int]:
    """Select the rank that caused a failure: one that was killed, since others fail because of it, else a failed one.

    A rank aborts itself (SIGABRT) for its own reasons, or since NCCL's watchdog found that another has gone.
    """
    order = {-signal.SIGABRT: 1, 0: 3}
    return min(fallen, key=lambda each: order.get(each[1], 0 if each[1] < 0 else 2))


def wait_until_ready(group: WorkerGroup, limit_s: float | None) -> Ready:
    """Raises what kept the workers from starting. `limit_s`: None waits as long as it takes."""
    began = time.monotonic()
    while True:
        report = group.receive(POLL_S)
        if isinstance(report, Ready):
            return report
        fallen = [] if report is not None else group.fallen()
        reports = [report] if not fallen else list(group.receive_all(LAST_WORDS_S))
        for each in reports:
            if isinstance(each, Failure):
                raise as_raised(each)
        if fallen:
            raise group.explain(*to_blame(fallen))
        if limit_s is not None and time.monotonic() - began > limit_s:
            raise EngineFailed(
                f"the engine was not ready after {limit_s:g} s",
                hint="raise start_s",
                details=group.stacks(),
            )
