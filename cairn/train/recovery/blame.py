"""What has happened? From what was found and what the ranks said to an incident: the cause, and whose node it was.

    Finding (exit, silence, stuck, late) + last words + is the node's agent there?  ->  Incident

A node is gone when its agent is, and all its ranks with it. Remembers only what failed last, to tell a failure that
comes again at the same step. What is done about it is the ladder's.
"""

import time
from pathlib import Path
from typing import Any

from cairn.core.exit_cause import Evidence, classify
from cairn.train.launch import Failure
from cairn.train.recovery.board import Board
from cairn.train.recovery.detect import Finding
from cairn.train.recovery.inquest import evidence_of
from cairn.train.recovery.ladder import Incident
from cairn.train.recovery.rank_process import Rank

TOGETHER_S = 3.0  # an agent that ended so shortly before its ranks ended with them


class Blame:
    def __init__(self, board: Board) -> None:
        self.board = board
        self.same: tuple[str, int] = ("", -1)
        self.same_count = 0
        self.began: list[int] = []  # when each agent began, at the start of the epoch

    def begin_epoch(self) -> None:
        self.began = [int(began) for began in self.board.nodes["began_ns"]]

    def incident(
        self, finding: Finding, failures: list[Failure], ranks: list[Rank], started: float
    ) -> tuple[Incident, float]:
        """And since when all was not well any more. `started`: when these processes were."""
        if finding.kind in ("silence", "stuck", "late"):
            evidence = Evidence(silent=finding.kind == "silence", stuck=finding.kind != "silence")
            rank: int | None = finding.rank
            why = finding.why
        else:
            rank, evidence = evidence_of(ranks, failures)
            why = ""
        verdict = classify(evidence)
        node = None if rank is None else ranks[rank].node
        lost = self._node_lost(node, ranks)
        cause = "hardware" if lost and verdict.cause == "killed" else verdict.cause
        since = int(self.board.ranks["beat_ns"][rank or 0]) / 1e9 or started
        incident = Incident(
            cause=cause, why=f"node {node} is gone" if lost else why or verdict.why, rank=rank, node=node,
            node_lost=lost, same_step=self._repeated(cause, rank),
        )  # fmt: skip
        return incident, finding.since if finding.kind == "stuck" else since

    def _node_lost(self, node: int | None, ranks: list[Rank]) -> bool:
        if node is None:
            return False
        line: Any = self.board.nodes[node]
        began = int(line["began_ns"])
        new = began != self.began[node] and time.monotonic_ns() - began < TOGETHER_S * 1e9
        gone = new or not _lives(int(line["pid"]))
        return gone and all(rank.word == "gone" for rank in ranks if rank.node == node)

    def _repeated(self, cause: str, rank: int | None) -> int:
        at = (cause, int(self.board.ranks["step"][rank or 0]))
        self.same_count = self.same_count + 1 if at == self.same else 0
        self.same = at
        return self.same_count


def who(incident: Incident) -> str:
    """For a person."""
    if incident.rank is None:
        return "the run"
    return f"rank {incident.rank} on node {incident.node}"


def _lives(pid: int) -> bool:
    return pid > 0 and Path(f"/proc/{pid}").exists()
