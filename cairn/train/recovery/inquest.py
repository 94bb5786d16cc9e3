"""Who was it? From the last words of all ranks to the one that failed for a reason of its own.

    rank 0  "Connection closed by peer"     a bystander: it lost somebody
    rank 1  ended by signal 9               that one
    rank 2  "Connection closed by peer"

A rank that dies takes the others down with it, and the first error to arrive is often that of a bystander. So whoever
asks waits a moment for those who know more. What the evidence means is told by `core/exit_cause`.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import wait

from cairn.core.errors import CairnError
from cairn.core.exit_cause import Evidence
from cairn.train.checkpoint.save import NotSaved
from cairn.train.launch import LOST, Failure
from cairn.train.recovery.checksum import Corrupted
from cairn.train.recovery.detect import Finding
from cairn.train.recovery.guarded_loop import RecallFailed
from cairn.train.recovery.rank_process import Rank

TICK_S = 0.05
GRACE_S = 0.25  # after the first sign of a failure, for others that know more
LOST_S = 1.5  # for a rank that only lost a connection: somebody else must have failed
NODE_S = 3.0  # for the ranks of a node whose agent is gone: they are about to go, too
AgentLeft = Callable[[int, list[int]], bool]  # (node, its ranks)


def hear_others(ranks: list[Rank], finding: Finding, agent_left: AgentLeft) -> list[Failure]:
    """Who else has something to say: the first error is often that of a bystander."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < GRACE_S or (
        finding.kind == "exit"
        and (
            (passed < LOST_S and not culprits(ranks))
            or (passed < NODE_S and _going(ranks, agent_left))
        )
    ):
        pipes = [rank.pipe for rank in ranks if not rank.over]
        if not pipes:
            break
        wait(pipes, timeout=TICK_S)
        for rank in ranks:
            rank.listen()
    return [rank.value for rank in ranks if rank.word == "failed"]


def _going(ranks: list[Rank], agent_left: AgentLeft) -> bool:
    """Whether a rank has gone with its node, and others of that node have not yet."""
    for node in {rank.node for rank in ranks if rank.word == "gone"}:
        here = [number for number, rank in enumerate(ranks) if rank.node == node]
        if not all(ranks[number].over for number in here) and agent_left(node, here):
            return True
    return False


def culprits(ranks: list[Rank]) -> list[int]:
    """Ranks that failed for a reason of their own."""
    return [
        number
        for number, rank in enumerate(ranks)
        if rank.word == "gone"
        or (rank.word == "failed" and not LOST.search(_last(rank.value.traceback)))
    ]


def evidence_of(ranks: list[Rank], failures: list[Failure]) -> tuple[int | None, Evidence]:
    wrong = next((f.error for f in failures if isinstance(f.error, Corrupted)), None)
    if wrong is not None:
        named = wrong.ranks[0] if wrong.certain and len(wrong.ranks) == 1 else None
        return named, Evidence(corrupted=True, words=wrong.message)
    if memory_failed(failures):
        words = next(str(f.error) for f in failures if isinstance(f.error, RecallFailed))
        return None, Evidence(corrupted=True, words=f"a copy in memory could not be read: {words}")
    guilty = culprits(ranks)
    gone = [rank for rank in guilty if ranks[rank].word == "gone"]
    if gone:
        return gone[0], Evidence(status=ranks[gone[0]].value)
    if guilty:
        first: Failure = min((ranks[r].value for r in guilty), key=lambda f: f.at)
        asked = isinstance(first.error, CairnError) and not isinstance(first.error, NotSaved)
        return first.rank, Evidence(status=1, words=first.traceback, user_error=asked)
    return None, Evidence(status=1, words=failures[0].traceback if failures else "")


def memory_failed(failures: list[Failure]) -> bool:
    """Whether a copy in memory could not be read: the disk is next."""
    return any(isinstance(failure.error, RecallFailed) for failure in failures)


def _last(text: str) -> str:
    return text.rpartition("\n  File ")[2]
