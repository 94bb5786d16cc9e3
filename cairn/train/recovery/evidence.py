"""Root-cause analysis: from the last messages of all ranks to one incident.

    rank 0  "Connection closed by peer"     a bystander: it lost another rank
    rank 1  ended by signal 9               this one
    rank 2  "Connection closed by peer"

A rank that dies takes the others down with it, and the first error to arrive is often that of a bystander, so the
driver waits a moment for the others. A node is gone when its memory is, and all its ranks without an error of their
own. What the evidence means is decided by `core/exit_cause`.
"""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Protocol

import msgspec

from cairn.core.errors import CairnError
from cairn.core.exit_cause import Cause, ExitEvidence, classify
from cairn.train.checkpoint.save import NotSaved
from cairn.train.launch import LOST, Failure
from cairn.train.recovery.checksum import Corrupted
from cairn.train.recovery.findings import WatchFinding
from cairn.train.recovery.rank_process import LocalRank

TICK_S = 0.05
GRACE_S = 0.25  # after the first sign of a failure, for others that know more
LOST_S = 1.5  # for a rank that only lost a connection: another one must have failed
NODE_S = 3.0  # for the ranks of a node whose memory is gone: they are about to go, too
MemoryGone = Callable[[int], bool]  # whether the memory of this node has ended


class RankEnd(Protocol):
    """Last message of a rank, or its exit status."""

    word: str | None
    value: object


class Blame(msgspec.Struct, frozen=True, kw_only=True):
    """The cause of a failure, and the rank it is attributed to."""

    cause: Cause
    why: str
    rank: int | None = None


def collect(
    ranks: list[LocalRank], memory_gone: MemoryGone, listen: Callable[[], None]
) -> list[Failure]:
    """Waits for the ranks that may know more; the errors of all that have failed."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < GRACE_S or (
        (passed < LOST_S and not culprits(ranks))
        or (passed < NODE_S and _going(ranks, memory_gone))
    ):
        pipes = [rank.pipe for rank in ranks if not rank.over]
        if not pipes:
            break
        wait(pipes, timeout=TICK_S)
        listen()
    return [rank.value for rank in ranks if rank.word == "failed"]


def _going(ranks: Sequence[LocalRank], memory_gone: MemoryGone) -> bool:
    """Return whether a rank ended with its node while others of that node have not ended yet."""
    for node in {rank.node for rank in ranks if rank.word == "gone"}:
        here = [rank for rank in ranks if rank.node == node]
        if not all(rank.over for rank in here) and memory_gone(node):
            return True
    return False


def culprits(ranks: Sequence[RankEnd]) -> list[int]:
    """Ranks that failed for a reason of their own."""
    return [
        number
        for number, rank in enumerate(ranks)
        if rank.word == "gone"
        or (rank.word == "failed" and not LOST.search(_last(rank.value.traceback)))  # type: ignore[attr-defined]
    ]


def blame(
    ranks: Sequence[RankEnd], failures: Sequence[Failure], findings: Sequence[WatchFinding]
) -> Blame:
    """`found`: what the watches of the nodes have written about ranks that they ended in this life."""
    if findings:
        return Blame(cause=findings[0].cause, why=findings[0].why, rank=findings[0].rank)
    rank, evidence = evidence_of(ranks, failures)
    verdict = classify(evidence)
    return Blame(cause=verdict.cause, why=verdict.why, rank=rank)


def evidence_of(
    ranks: Sequence[RankEnd], failures: Sequence[Failure]
) -> tuple[int | None, ExitEvidence]:
    wrong = next((f.error for f in failures if isinstance(f.error, Corrupted)), None)
    if wrong is not None:
        named = wrong.ranks[0] if wrong.certain and len(wrong.ranks) == 1 else None
        return named, ExitEvidence(corrupted=True, words=wrong.message)
    guilty = culprits(ranks)
    gone = [rank for rank in guilty if ranks[rank].word == "gone"]
    if gone:
        return gone[0], ExitEvidence(status=ranks[gone[0]].value)  # type: ignore[arg-type]
    if guilty:
        own = [failure for failure in failures if failure.rank in guilty]
        first = min(own, key=lambda failure: failure.at)
        is_user_error = isinstance(first.error, CairnError) and not isinstance(
            first.error, NotSaved
        )
        return first.rank, ExitEvidence(status=1, words=first.traceback, user_error=is_user_error)
    return None, ExitEvidence(status=1, words=failures[0].traceback if failures else "")


def _last(text: str) -> str:
    return text.rpartition("\n  File ")[2]
