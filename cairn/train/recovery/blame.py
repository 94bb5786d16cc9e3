"""What has happened? From what was found and what the ranks said to an incident: the cause, and whose node it was.

    Finding (exit, silence, stuck, late) + last words + is the node's agent there?  ->  Incident

A node is gone when its agent is, and all its ranks without a word: one that tells of a lost connection lives. Remembers
only what failed last, to tell a failure that comes again at the same step. What is done about it is the ladder's.
"""

from typing import Any

from cairn.core.exit_cause import classify
from cairn.train.launch import Failure
from cairn.train.recovery.board import Board
from cairn.train.recovery.detect import Finding, verdict_of
from cairn.train.recovery.inquest import evidence_of
from cairn.train.recovery.ladder import Incident
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.rank_process import Rank

TOGETHER_S = 3.0  # an agent that began anew so shortly before its ranks' last sign of life


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
        if finding.kind != "exit":
            rank: int | None = finding.rank
            verdict = verdict_of(finding)
        else:
            rank, evidence = evidence_of(ranks, failures)
            verdict = classify(evidence)
        node = None if rank is None else ranks[rank].node
        lost = self._node_lost(node, ranks)
        cause = "hardware" if lost and verdict.cause == "killed" else verdict.cause
        since = int(self.board.ranks["beat_ns"][rank or 0]) / 1e9 or started
        incident = Incident(
            cause=cause, why=f"node {node} is gone" if lost else verdict.why, rank=rank, node=node,
            node_lost=lost, same_step=self._repeated(cause, rank),
        )  # fmt: skip
        return incident, finding.since if finding.kind == "stuck" else since

    def _node_lost(self, node: int | None, ranks: list[Rank]) -> bool:
        if node is None:
            return False
        here = [number for number, rank in enumerate(ranks) if rank.node == node]
        return self.agent_left(node, here) and all(ranks[n].word == "gone" for n in here)

    def agent_left(self, node: int, here: list[int]) -> bool:
        """Whether the node's agent is gone, or has begun anew since its ranks (`here`) were last seen.

        Compared with their last signs of life, not with the clock: on a busy machine it is looked at late.
        """
        line: Any = self.board.nodes[node]
        began = int(line["began_ns"])
        seen_ns = max((int(self.board.ranks["beat_ns"][rank]) for rank in here), default=0)
        anew = began != self.began[node] and began > seen_ns - TOGETHER_S * 1e9
        return anew or not _lives(int(line["pid"]))

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
    """One that was killed and that nobody has asked about yet is dead."""
    return pid > 0 and process_state(pid) not in ("", "Z", "X")
