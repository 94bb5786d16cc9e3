"""What the board shows, for two readers: the detection ladder, and the ledger of wall time.

    board --seen--> Seen, one per rank        board --look--> Trained, Stepped: when each step ended, what it waited for

One of these for each epoch. Reads the board and /proc; decides nothing.
"""

import time

from cairn.core.job_ledger import Started, Stepped, Trained
from cairn.train.recovery.board import Board
from cairn.train.recovery.detect import Progress, Seen, Spent, moved
from cairn.train.recovery.journal import Journal
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.rank_process import Rank


class Watching:
    def __init__(self, board: Board, journal: Journal, ranks: list[Rank], began_at: int) -> None:
        """`began_at`: the step from which this epoch goes on."""
        self.board, self.journal, self.ranks, self.began_at = board, journal, ranks, began_at
        self.started = time.monotonic()
        self.progress = Progress(at=self.started)
        self.trained = False
        self.noted, self.last_end = began_at, self.started
        self.blocked = 0.0
        self.looked: dict[int, int] = {}  # rank -> the last step that was seen
        self.dragged_s = self.dragged_told = (
            0.0  # by which slow ranks made steps longer; in the ledger
        )

    @property
    def young(self) -> bool:
        """No step yet in this life."""
        return not self.trained or self.noted == self.began_at

    def seen(self) -> list[Seen]:
        lines = self.board.ranks
        return [
            Seen(
                rank=number, alive=rank.word in (None, "done", "paused"),
                phase=int(lines["phase"][number]),
                beat=0.0 if rank.over else int(lines["beat_ns"][number]) / 1e9,
                step=int(lines["step"][number]), collectives=int(lines["collectives"][number]),
                busy_s=int(lines["busy_ns"][number]) / 1e9, recent=self._recent(number),
                state=process_state(int(lines["pid"][number])),
            )
            for number, rank in enumerate(self.ranks)
        ]  # fmt: skip

    def _recent(self, rank: int) -> tuple[Spent, ...]:
        """What the rank did in each step since the last look."""
        found = tuple(Spent(*spent) for spent in self.board.spent(rank, self.looked.get(rank, -1)))
        self.looked[rank] = max([self.looked.get(rank, -1), *(spent.step for spent in found)])
        return found

    def look(self) -> list[Seen]:
        """What there is to see now; what is new of it goes into the ledger."""
        seen = self.seen()
        self.progress = moved(self.progress, seen, time.monotonic())
        if not self.trained:
            begun = [int(self.board.ranks["trained_ns"][rank]) for rank in range(len(self.ranks))]
            if not all(begun):
                return seen
            self.trained, self.last_end = True, max(begun) / 1e9
            resumed = int(self.board.ranks["resumed"][0])
            if (
                resumed != self.began_at
            ):  # the newest checkpoint was damaged, and an older one had to do
                self.noted = self.began_at = resumed
                self.journal.note(Started(at=self.last_end, step=resumed))
            self.journal.note(Trained(at=self.last_end))
        self._note_steps()
        return seen

    def _note_steps(self) -> None:
        waited = int(self.board.ranks["blocked_ns"][0]) / 1e9
        for step, ended_ns in self.board.ends(0, self.noted):
            at = ended_ns / 1e9
            share = min(waited - self.blocked, max(0.0, at - self.last_end))
            self.blocked += share
            dragged, self.dragged_told = self.dragged_s - self.dragged_told, self.dragged_s
            self.journal.note(Stepped(at=at, step=step, blocked=share, dragged=dragged))
            self.noted, self.last_end = step, at
        self.journal.book.safe(self.board.committed(len(self.ranks)))
