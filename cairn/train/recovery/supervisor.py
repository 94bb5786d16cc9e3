"""Keeps a run going: starts its ranks, watches them, and decides with the ladder what happens when one fails.

    start epoch n  ->  watch  --all done-->  result
        ^                |---incident--> end the ranks -> respond (ladder) -> where can we go back to? --.
        |                '---a node is back--> pause after a copy in memory -> larger layout ------------|
        '------------------------------------------------------------------------------------------------'

Every epoch has its own rendezvous, so nothing of a dead life is met again. One thread: it forks. What it knows is in
RUN/recovery/status.json and in the agents' memory, so another supervisor can take over (`supervised`).
"""

import os
import signal
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec

from cairn.core.checkpoint_interval import every_steps
from cairn.core.errors import CairnError
from cairn.core.events import instant
from cairn.core.job_ledger import (
    Ended,
    Failed,
    Noticed,
    Paused,
    Started,
    Stepped,
    Submitted,
)
from cairn.core.shared_secret import Secret
from cairn.train.checkpoint.peer_placement import node_of
from cairn.train.checkpoint.peer_recall import Reach, Recall
from cairn.train.config import Train
from cairn.train.launch import Failure, RankFailed, first_failure
from cairn.train.recovery.blame import Blame, who
from cairn.train.recovery.board import PAUSE, PHASES, Board
from cairn.train.recovery.detect import Finding, Seen, Slowness, judge
from cairn.train.recovery.going_back import GoingBack
from cairn.train.recovery.guarded_loop import Post
from cairn.train.recovery.inquest import TICK_S, hear_others, memory_failed
from cairn.train.recovery.journal import Journal, RankStatus, Status, read_status
from cairn.train.recovery.ladder import Incident, Left, Response, grown, respond
from cairn.train.recovery.rank_process import Assignment, Rank, RankFunction, end_ranks, start_rank
from cairn.train.recovery.stall_note import read_note, stall_path, where
from cairn.train.recovery.stopped_agents import StoppedAgents
from cairn.train.recovery.templates import Fits
from cairn.train.recovery.watching import Watching


class Site(msgspec.Struct, frozen=True):
    """What outlives a supervisor: where the agents are reached, and a folder for rendezvous."""

    folder: str
    paths: tuple[str, ...]  # of the agents, by node
    addresses: tuple[str, ...]  # host:port
    root: int  # process id
    life: str  # of the root: process ids are used again
    secret: Secret | None = None  # of this run: only its own processes get at the copies


class Requeue(CairnError):
    """Too little is left here to go on; a scheduler has to find other nodes."""

    exit_status = 75  # EX_TEMPFAIL: try again elsewhere


class Supervisor:
    def __init__(
        self, config: Train, board: Board, site: Site, device: str, train: RankFunction, fits: Fits,
        say: Any = print,
    ) -> None:  # fmt: skip
        self.asked, self.config, self.board, self.site = config, config, board, site
        self.settings, self.device, self.train, self.fits, self.say = (
            config.recovery, device, train, fits, say,
        )  # fmt: skip
        known = read_status(config.folder)
        self.taking_over = known is not None and known.life == site.life
        self.journal = Journal(config.folder, go_on=self.taking_over)
        self.epoch = self.failures = 0
        self.nodes = list(range(self.settings.nodes))
        self.strikes: dict[int, int] = {}
        self.cordoned: dict[int, str] = {}
        self.lost_at: dict[int, float] = {}
        self.back = GoingBack(site.addresses, config.folder / "checkpoints", site.secret)
        self.blame = Blame(board)
        self.stopped = StoppedAgents(board, say)
        if known is not None and self.taking_over:
            self._take_over(known)
        self.ranks: list[Rank] = []
        self.slow: list[int] = []

    # -- the life of a run ----------------------------------------------------------------------------

    def run(self) -> Any:
        if not self.taking_over:
            self.journal.note(Submitted(at=_submitted()))
        recall = self._newest() if self.taking_over else None
        try:
            while True:
                self._start(recall)
                result = self._watch()
                if result is not None:
                    self.journal.note(Ended(at=time.monotonic()))
                    return result[0]
                recall = self._newest()
        except BaseException:
            self.journal.note(Ended(at=time.monotonic(), finished=False))
            raise
        finally:
            end_ranks(self.ranks)
            self.journal.write(self._status(), force=True)
            self.journal.close()

    def _newest(self) -> Recall | None:
        self.stopped.end(0.0)
        return self.back.newest()

    def _take_over(self, known: Status) -> None:
        """The supervisor before was killed; its ranks went with it, the memory did not."""
        self.epoch = known.epoch
        self.back.generation, self.back.worlds = known.generation, dict(known.worlds)
        self.nodes, self.strikes, self.failures = known.nodes, known.strikes, known.failures + 1
        self.cordoned, self.back.trusted = known.cordoned, known.trusted
        self.config = msgspec.structs.replace(self.asked, parallel=known.layout)
        for step, ended_ns in self.board.ends(0, self.journal.book.step):
            self.journal.note(Stepped(at=ended_ns / 1e9, step=step))
        beats = [int(beat) / 1e9 for beat in self.board.ranks["beat_ns"] if beat]
        now = time.monotonic()
        why = "the supervisor was ended"
        self.journal.note(
            Failed(at=now, since=max(beats, default=now), cause="killed", why=why, rung="heal")
        )

    # -- one epoch ------------------------------------------------------------------------------------

    def _start(self, recall: Recall | None) -> None:
        self.epoch += 1
        self._choose_interval()
        world = self.config.parallel.world()
        back_to = self.back.set_out(recall, world)
        self.board.begin_epoch(self.epoch)
        self.board.ranks["replicated"][:] = self.board.ranks["copied"][:] = (
            back_to if recall is not None and recall.generation == self.back.generation else -1
        )
        self.journal.note(Started(at=time.monotonic(), step=back_to))
        self.blame.begin_epoch()
        self.slowness = Slowness(self.settings.slow_factor)
        self.ranks = [self._rank(rank, world, recall) for rank in range(world)]
        self.watching = Watching(self.board, self.journal, self.ranks, back_to)

    def _rank(self, rank: int, world: int, recall: Recall | None) -> Rank:
        node = node_of(rank, world, self.nodes)
        site = self.site
        reach = Reach(node, site.paths[node], site.addresses, site.secret, site.paths)
        seconds = self.journal.ledger().wall if self.settings.interval else 0.0
        post = Post(rank, world, reach, self.back.generation, recall, self.failures, seconds)
        folder = Path(self.site.folder)
        given = Assignment(
            self.config, post, self.board, self.epoch, folder, self.device, self.train
        )
        return start_rank(given, node)

    def _choose_interval(self) -> None:
        """checkpoint.every by Young and Daly, once something has been measured."""
        ledger = self.journal.ledger()
        saved = int(self.board.ranks["saved"][0])
        if not self.settings.interval or not saved or ledger.steps < 1:
            return
        cost_s = int(self.board.ranks["saving_ns"][0]) / 1e9 / saved
        step_s = (ledger.parts["productive"] + ledger.parts["lost"]) / max(ledger.steps, 1)
        every = every_steps(cost_s, step_s, self.failures, ledger.wall)
        saving = msgspec.structs.replace(self.config.checkpoint, every=every)
        self.config = msgspec.structs.replace(self.config, checkpoint=saving)
        self.say(
            f"a checkpoint every {every} steps: it costs {cost_s:.3f} s, {self.failures} failures so far"
        )

    def _watch(self) -> tuple[Any] | None:
        """The result, once all are done; None when another epoch has to begin."""
        while True:
            wait([rank.pipe for rank in self.ranks if not rank.over], timeout=TICK_S)
            for rank in self.ranks:
                rank.listen()
            now = time.monotonic()
            watching, seen = self.watching, self.watching.look()
            if watching.trained and self._slow_leaves(seen):
                return None
            if self.board.committed(len(self.ranks)) > watching.began_at:
                self.back.forget_other_layouts(len(self.ranks))
            self.stopped.end(self.settings.silent_s)
            self.journal.write(self._status())
            if all(rank.word == "done" for rank in self.ranks):
                end_ranks(self.ranks)
                return (self.ranks[0].value,)
            if all(rank.word in ("paused", "done") for rank in self.ranks):
                end_ranks(self.ranks)
                self.journal.note(Paused(at=now, cause="grow"))
                return None
            finding = judge(seen, watching.progress, watching.started, now, self.settings)
            if finding is not None:
                self._answer(finding)
                return None
            self._grow_if_possible(now)

    def _slow_leaves(self, seen: list[Seen]) -> bool:
        """Stragglers are named; True if the ladder says that one of them is done without."""
        found = self.slowness.look(seen)
        self.watching.dragged_s = self.slowness.dragged_s
        for rank in found:
            self.slow.append(rank)
            why, node = self.slowness.evidence[rank].words(), self.ranks[rank].node
            self._notice("straggler", rank, why)
            incident = Incident(cause="straggler", why=why, rank=rank, node=node)
            if respond(incident, self._left(), self.settings, self.fits).rung != "tell":
                self._answer(Finding("slow", rank, time.monotonic(), why))
                return True
        for rank in self.slowness.over:
            self._notice("straggler over", rank, "it keeps up with the others again")
        return False

    def _notice(self, what: str, rank: int, why: str) -> None:
        step, node = self.slowness.step, self.ranks[rank].node
        self.journal.note(Noticed(at=time.monotonic(), what=what, rank=rank, step=step, why=why))
        instant(what, rank=rank, node=node, step=step, why=why)
        self.say(f"{what}: rank {rank} on node {node}: {why}")

    # -- what is done ---------------------------------------------------------------------------------

    def _answer(self, finding: Finding) -> None:
        found_at = time.monotonic()
        if finding.kind == "stuck":
            why = f"{finding.why}{where(self._collectives(), finding.rank)}"
            finding = msgspec.structs.replace(finding, why=why)
        failures = hear_others(self.ranks, finding, self.blame.agent_left)
        self.back.trusted = self.back.trusted and not memory_failed(failures)
        incident, since = self.blame.incident(finding, failures, self.ranks, self.watching.started)
        end_ranks(self.ranks)
        self._count(incident)
        left = self._left()
        response = respond(incident, left, self.settings, self.fits)
        self.journal.note(
            Failed(
                at=found_at, since=min(since, found_at), cause=incident.cause, rank=incident.rank,
                node=incident.node, why=incident.why, rung=response.rung,
            )
        )  # fmt: skip
        self.say(
            f"{who(incident)}: {incident.cause} ({incident.why}); {response.rung}: {response.why}"
        )
        instant("recovery", cause=incident.cause, rung=response.rung)
        if response.rung == "stop":
            raise self._told(incident, response, failures)
        if response.rung == "requeue":
            raise Requeue(
                f"{response.why} ({incident.cause}: {incident.why})",
                hint="submit it again with the same --out: it goes on from the newest checkpoint",
            )
        self._apply(response, incident)

    def _collectives(self) -> dict[int, str]:
        """In which collective each rank stands, as far as they have written it down."""
        pids, folder = self.board.ranks["pid"], Path(self.site.folder)
        notes = {n: read_note(stall_path(folder, n), int(pids[n])) for n in range(len(self.ranks))}
        return {rank: note.collective if note else "" for rank, note in notes.items()}

    def _count(self, incident: Incident) -> None:
        self.failures += 1
        if incident.node is not None:
            self.strikes[incident.node] = self.strikes.get(incident.node, 0) + 1

    def _left(self) -> Left:
        whole = self.settings.nodes + self.settings.spare_nodes
        spares = tuple(n for n in range(whole) if n not in self.nodes and n not in self.cordoned)
        per_node = -(-self.asked.parallel.world() // self.settings.nodes)
        return Left(
            layout=self.asked.parallel, nodes=tuple(self.nodes), spares=spares,
            ranks_per_node=per_node, strikes=self.strikes, failures=self.failures,
        )  # fmt: skip

    def _apply(self, response: Response, incident: Incident) -> None:
        self.nodes = list(response.nodes) or self.nodes
        for node in response.cordon:
            self.cordoned[node] = incident.why
            self.lost_at[node] = time.monotonic()
        if response.layout is not None:
            self.config = msgspec.structs.replace(self.asked, parallel=response.layout)

    def _grow_if_possible(self, now: float) -> None:
        """A node that was lost is asked for again; the ranks pause after a copy in memory, and nothing is lost."""
        whole = self.asked.parallel.world()
        whole_again = self.config.parallel.world() == whole
        if whole_again or self.watching.young or self.board.paused() or self.board.stopping():
            return
        back = tuple(n for n, at in self.lost_at.items() if now - at > self.settings.rejoin_s)
        response = grown(self._left(), back, self.fits)
        if response is None or response.layout is None:
            return
        for node in back:
            self.cordoned.pop(node, None)
            self.lost_at.pop(node, None)
            self.strikes.pop(node, None)
        self.nodes = sorted(response.nodes)
        self.config = msgspec.structs.replace(self.asked, parallel=response.layout)
        self.say(f"{response.why}; the ranks pause after this step")
        self.board.order(PAUSE)

    # -- processes ------------------------------------------------------------------------------------

    def _told(self, incident: Incident, response: Response, failures: list[Failure]) -> CairnError:
        if failures:
            return first_failure(failures)
        return RankFailed(
            f"rank {incident.rank}: {incident.why}; {response.why}",
            hint="run it again with the same --out: it goes on from the newest complete checkpoint",
        )

    def _status(self) -> Status:
        lines = self.board.ranks
        ranks = [
            RankStatus(
                number, int(lines["pid"][number]), rank.node, PHASES[int(lines["phase"][number])],
                int(lines["step"][number]), int(lines["address"][number]), int(lines["bytes"][number]),
            )
            for number, rank in enumerate(self.ranks)
        ]  # fmt: skip
        return Status(
            epoch=self.epoch, generation=self.back.generation, worlds=self.back.worlds,
            layout=self.config.parallel, nodes=self.nodes, strikes=self.strikes,
            failures=self.failures, cordoned=self.cordoned, root=self.site.root, life=self.site.life,
            supervisor=os.getpid(),
            agents={n: int(line["pid"]) for n, line in enumerate(self.board.nodes)}, ranks=ranks,
            committed=self.board.committed(max(len(self.ranks), 1)), slow=self.slow,
            trusted=self.back.trusted,
        )  # fmt: skip


def _submitted() -> float:
    """When the job was handed in, on this machine's monotonic clock; a scheduler says so in the environment."""
    waited = float(os.environ.get("CAIRN_QUEUED_S", "0") or 0)
    return time.monotonic() - waited


def ignore_interrupts() -> None:
    """Ctrl-C reaches the ranks, which end in order; whoever looks after them stays."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
