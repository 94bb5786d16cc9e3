"""Who was it? From the last words of all ranks to the one that failed for a reason of its own.

    rank 0  "Connection closed by peer"     a bystander: it lost somebody
    rank 1  ended by signal 9               that one
    rank 2  "Connection closed by peer"

A rank that dies takes the others down with it, and the first error to arrive is often that of a bystander. So whoever
asks waits a moment for those who know more. What the evidence means is told by `core/exit_cause`.
"""

import time
from multiprocessing.connection import wait

from cairn.core.errors import CairnError
from cairn.core.exit_cause import Evidence
from cairn.train.launch import LOST, Failure
from cairn.train.recovery.checksum import Corrupted
from cairn.train.recovery.detect import Finding
from cairn.train.recovery.guarded_loop import RecallFailed
from cairn.train.recovery.rank_process import Rank

TICK_S = 0.05
GRACE_S = 0.25  # after the first sign of a failure, for others that know more
LOST_S = 1.5  # for a rank that only lost a connection: somebody else must have failed


def hear_others(ranks: list[Rank], finding: Finding) -> list[Failure]:
    """Who else has something to say: the first error is often that of a bystander."""
    deadline = time.monotonic() + GRACE_S
    last = time.monotonic() + (LOST_S if finding.kind == "exit" else GRACE_S)
    while time.monotonic() < deadline or (
        finding.kind == "exit" and not culprits(ranks) and time.monotonic() < last
    ):
        pipes = [rank.pipe for rank in ranks if not rank.over]
        if not pipes:
            break
        wait(pipes, timeout=TICK_S)
        for rank in ranks:
            rank.listen()
    return [rank.value for rank in ranks if rank.word == "failed"]


def culprits(ranks: list[Rank]) -> list[int]:
    """Ranks that failed for a reason of their own."""
    return [
        number
        for number, rank in enumerate(ranks)
        if rank.word == "gone"
        or (rank.word == "failed" and not LOST.search(_last(rank.value.traceback)))
    ]


def evidence_of(ranks: list[Rank], failures: list[Failure]) -> tuple[int | None, Evidence]:
    wrong = next((f for f in failures if isinstance(f.error, Corrupted)), None)
    if wrong is not None and wrong.error is not None:
        named = [word for word in wrong.error.message.split()[:2] if word.isdecimal()]
        return (int(named[0]) if named else None), Evidence(corrupted=True, words=wrong.error.message)  # fmt: skip
    if memory_failed(failures):
        words = next(str(f.error) for f in failures if isinstance(f.error, RecallFailed))
        return None, Evidence(corrupted=True, words=f"a copy in memory could not be read: {words}")
    guilty = culprits(ranks)
    gone = [rank for rank in guilty if ranks[rank].word == "gone"]
    if gone:
        return gone[0], Evidence(status=ranks[gone[0]].value)
    if guilty:
        first: Failure = min((ranks[r].value for r in guilty), key=lambda f: f.at)
        return first.rank, Evidence(
            status=1, words=first.traceback, user_error=isinstance(first.error, CairnError)
        )
    return None, Evidence(status=1, words=failures[0].traceback if failures else "")


def memory_failed(failures: list[Failure]) -> bool:
    """Whether a copy in memory could not be read: the disk is next."""
    return any(isinstance(failure.error, RecallFailed) for failure in failures)


def _last(text: str) -> str:
    return text.rpartition("\n  File ")[2]
