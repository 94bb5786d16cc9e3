"""What one node of a launched job shows of its ranks, and what it can be reported: the messages between node watches.

    board of the node + stall notes  --report_of-->  NodeReport  --a line of JSON-->  the leader's watch
    the leader                       ------------Order: end this rank, for this reason------------->

`Duty` is what the ranks agreed on after they met: who leads, and how long each one waits. `life` is a number that only
this start of the ranks has: what comes from another life is not listened to.
"""

from pathlib import Path

import msgspec

from cairn.core.end_reason import EndReason
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.stall_note import StallNote, read_note, stall_path
from cairn.train.recovery.status_board import Board

MOST_STEPS = 256  # reported in one message


class Duty(msgspec.Struct, frozen=True, kw_only=True):
    """Written into the node's folder by its first rank, after each meeting."""

    life: int
    leader: str  # host:port of the watch that judges
    leads: bool  # whether that is this node's
    node: str  # worker-1, or the host's name
    host: str
    world: int
    run: str  # the folder of the run, where findings are written down
    settings: Recovery
    replaced: bool = False  # whether a new node comes for one that leaves
    least: int = 1  # ranks without which the job cannot go on


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    phase: int
    step: int
    collectives: int
    spent: tuple[
        tuple[int, float, float], ...
    ] = ()  # step, computed, whole; since the last message
    collective: str = ""  # the last one, where the rank stands still
    waits: bool = True


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    life: int
    node: str
    host: str
    ranks: tuple[RankReport, ...]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """End this rank; `leave`: and the node with it."""

    life: int
    rank: int
    reason: EndReason
    leave: bool = False


def report_of(board: Board, folder: Path, duty: Duty, reported: dict[int, int]) -> NodeReport:
    """`reported`: rank -> the last step that was reported; moved on."""
    ranks = []
    for rank in ranks_of(board, duty.life):
        line = board.ranks[rank]
        spent = tuple(board.spent(rank, reported.get(rank, -1))[-MOST_STEPS:])
        if spent:
            reported[rank] = max(reported.get(rank, -1), spent[-1][0])
        note = stall_of(board, folder, rank)
        ranks.append(
            RankReport(
                rank=rank,
                phase=int(line["phase"]),
                step=int(line["step"]),
                collectives=int(line["collectives"]),
                spent=spent,
                collective=note.collective if note else "",
                waits=note.waits if note else True,
            )
        )
    return NodeReport(life=duty.life, node=duty.node, host=duty.host, ranks=tuple(ranks))


def ranks_of(board: Board, life: int) -> list[int]:
    """Those that live here, of this life."""
    lines = board.ranks
    return [rank for rank in lines["pid"].nonzero()[0].tolist() if lines["epoch"][rank] == life]


def stall_of(board: Board, folder: Path, rank: int) -> StallNote | None:
    return read_note(stall_path(folder, rank), int(board.ranks["pid"][rank]))
