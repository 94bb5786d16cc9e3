"""A rank of a launched job (torchrun under `cairn launch`) that survives the loss of its node.

    node a: launcher -- ranks .. node memory  <== copies over TCP ==>  node memory .. ranks -- launcher :node b

The launcher starts ranks anew and replaces nodes; what is added here is where their state comes from. All ranks meet,
decide together from which step they go on (`meeting`), read it from memory, and train with `GuardedLoop`'s copies and
comparisons. A copy counts once all ranks have agreed that it is
made; rank 0 warns where no second node has taken it. No process decides alone; the
watch of rank 0's node finds who hangs and who is slow (`node_watch`).
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from cairn.core.shared_secret import Secret, secret_from
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.peer_memory import PATIENCE_S
from cairn.train.checkpoint.peer_recall import Reach, Recall, ask_holdings, forget, keep_at
from cairn.train.checkpoint.save import STORAGE_TIMEOUT
from cairn.train.config import Train
from cairn.train.launch import join_group, reporting_lost_peers
from cairn.train.loop import Outcome
from cairn.train.metrics_log import Record
from cairn.train.only_here import only_here
from cairn.train.recovery import node_memory
from cairn.train.recovery.board import STARTING, Board
from cairn.train.recovery.children import end_process
from cairn.train.recovery.guarded_loop import Assignment, GuardedLoop, Heartbeat, RecallFailed
from cairn.train.recovery.launched_ledger import LaunchedLedger
from cairn.train.recovery.meeting import Agreement, Arrived, Present, decide, secret_of
from cairn.train.recovery.node_sight import Duty
from cairn.train.recovery.node_watch import DUTY
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.stall_note import stall_path
from cairn.train.recovery.stall_writer import StallWriter
from cairn.train.run import run

FOREVER = 2**62
LOOPBACK = "127.0.0.1"


def run_launched(
    config: Train,
    rank: int,
    device: str,
    log_line: Callable[[str], None] = print,
    on_record: Callable[[Record], None] = lambda record: None,
    address: str = "env://",
) -> Any:
    """The whole of a rank's work: it joins the others at `address`, agrees with them on a state, and trains."""
    world = config.parallel.world()
    leaving: Any = None
    if world > 1:
        join_group(rank, world, address, device, config.recovery.stuck_s)
        # Others wait in it while rank 0 exports, which may take longer than any collective.
        leaving = dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)
    node = node_memory.node_here()
    first = int(os.environ.get("LOCAL_RANK", "0")) == 0
    job_secret = secret_from(os.environ) or node.secret
    arrived = _everybody(Arrived(socket.gethostname(), job_secret, Secret.fresh()), world)
    host, secret = _own_address([one.host for one in arrived]), secret_of(arrived)
    find = partial(
        node_memory.find, node, first, host, config.recovery, config.folder, rank == 0, secret
    )
    find()
    board = NodeBoard(node)
    present = _present(node, first, config, rank, board, secret)
    agreement = decide(_everybody(present, world), rank)
    _set_out(agreement, board, rank, secret)
    stall = StallWriter(stall_path(node.folder, rank), config.recovery.stuck_s)
    heartbeat = Heartbeat(board, rank, config.recovery.heartbeat_s, stall)
    heartbeat.start()
    if agreement.leads:
        _give_duty(node, agreement, config, rank)
    reach = Reach(0, node.path, agreement.addresses, secret)
    assignment = Assignment(rank, world, reach, agreement.generation, agreement.recall)
    ledger = LaunchedLedger(config.folder, agreement, world, board) if rank == 0 else None

    def revive() -> None:
        """The node's memory was killed: another one, empty, in its place."""
        find()
        _give_duty(node, agreement, config, rank)
        keep_at(agreement.addresses[0], agreement.keeper, secret)

    make_loop = partial(
        LaunchedLoop,
        board=board,
        assignment=assignment,
        leads=agreement.leads,
        ledger=ledger,
        revive=revive if first else None,
    )
    with reporting_lost_peers(rank, "the launcher starts it again, and it goes on from memory"):
        with _only_run(config, rank):
            result = run(config, rank, log_line, on_record, make_loop)
        heartbeat.stop()
        if leaving is not None:
            # In order: threads of a group that is left alone end the process with an error.
            dist.barrier(leaving)
            dist.destroy_process_group()
        return result


def _only_run(config: Train, rank: int) -> AbstractContextManager[None]:
    """No other job writes to the folder; the driver of the nodes of one machine has made sure of it."""
    if rank != 0 or os.environ.get(node_memory.SHARED):
        return nullcontext()
    config.folder.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("CAIRN_JOB_FAILURES") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return only_here(config.folder, name)


class NodeBoard(Board):
    """The board of one node. What all nodes hold is only known once the ranks have agreed on it."""

    def __init__(self, node: node_memory.Node) -> None:
        super().__init__(node_memory.MOST_RANKS, 1, node.folder / node_memory.BOARD)
        self.agreed = -1  # the newest step of which every rank has a copy
        self.doubled = -1  # the newest step of which two nodes hold every rank's copy

    def committed(self, world: int) -> int:
        return self.agreed

    def forget_copies(self, rank: int) -> None:
        super().forget_copies(rank)
        self.agreed = self.doubled = -1


class LaunchedLoop(GuardedLoop):
    def __init__(
        self,
        *args: Any,
        leads: bool,
        ledger: LaunchedLedger | None,
        revive: Callable[[], None] | None,
        **named: Any,
    ) -> None:
        super().__init__(*args, **named)
        self.leads, self.ledger, self.revive = leads, ledger, revive
        self.peers.patience_s = 0.0  # the waiting is done in `_agree`
        self.forgotten = False
        self.copies = self.single_copies = 0  # made; of those, held by one node only
        self.single = False  # the last one was
        self.handed_to = 0  # the process that was given the last copy

    def run(self) -> Outcome:
        outcome = super().run()
        if self.single_copies:
            self.log_line(
                f"note: {self.single_copies} of {self.copies} copies in memory were held by one node only"
            )
        if self.ledger is not None and not outcome.stopped_early:
            self.ledger.ended()
        return outcome

    def resume(self) -> bool:
        resumed = super().resume()
        if self.ledger is not None:
            self.ledger.trained(self.state.step)
        return resumed

    def _recall(self) -> bool:
        """If one rank cannot read a copy from memory, no rank goes on from it; the disk is next."""
        trouble, recalled = "", False
        try:
            recalled = super()._recall()
        except RecallFailed as error:
            trouble = str(error)
        if not super(GuardedLoop, self)._anybody(bool(trouble)):
            return recalled
        why = trouble or "another rank could not read its copy"
        self.log_line(f"warning: the copies in memory cannot be used ({why}); resuming from disk")
        forget(self.assignment.reach.addresses[0], FOREVER, -1, self.assignment.reach.secret)
        if not super(GuardedLoop, self)._anybody(bool(folders.complete_steps(self.root))):
            raise RecallFailed(why)
        return False

    def _history(self) -> tuple[int, float]:
        """By the ledger, which outlives the ranks; the seconds of this life are not counted twice."""
        if self.ledger is None:
            return super()._history()
        with self.ledger.lock:
            history = self.ledger.journal.ledger()
        life_s = (time.monotonic_ns() - int(self.board.ranks["trained_ns"][self.rank])) / 1e9
        return len(history.incidents), max(0.0, history.wall - life_s)

    def _one_step(self) -> None:
        super()._one_step()
        if self.ledger is not None:
            waited = int(self.board.ranks["blocked_ns"][self.rank]) / 1e9
            safe = self.board.committed(self.world)
            for news in self.ledger.stepped(self.state.step, waited, safe):
                self.log_line(news)

    def _copy(self) -> None:
        began = time.monotonic_ns()
        if self.revive is not None and self._memory_ended():
            self.log_line("warning: the memory of this node was ended; another one takes its place")
            self.revive()
        self._agree(0.0 if self.copy_soon else PATIENCE_S)
        self.board.ranks["blocked_ns"][self.rank] += time.monotonic_ns() - began
        self.handed_to = int(self.board.nodes["pid"][0])
        super()._copy()

    def _memory_ended(self) -> bool:
        """A memory that is stopped (a debugger, SIGSTOP) holds up every copy: after a while it is ended."""
        memory = int(self.board.nodes["pid"][0])
        deadline = time.monotonic() + self.settings.silent_s
        while process_state(memory) == "T":
            if time.monotonic() > deadline:
                end_process(memory)
            time.sleep(0.02)
        return process_state(memory) in ("", "Z")

    def _rewind(self, what: str) -> None:
        """Steps that were taken back are done again, with other samples: no copy of them stays beside the new ones."""
        super()._rewind(what)
        self._await_settled(PATIENCE_S)
        super(GuardedLoop, self)._anybody(False)  # no copy is on its way to another node
        if self.leads:
            reach = self.assignment.reach
            forget(reach.addresses[0], self.assignment.generation, -1, reach.secret)
        self.board.forget_copies(self.rank)
        super(GuardedLoop, self)._anybody(
            False
        )  # no rank copies before all have dropped the old ones
        self.copy_soon = True

    def _await_settled(self, patience_s: float) -> None:
        """Until this rank's last copy is on another node, or was refused there."""
        line, rank = self.board.ranks, self.rank
        deadline = time.monotonic() + patience_s
        while line["settled"][rank] < line["copied"][rank] and time.monotonic() < deadline:
            memory = int(self.board.nodes["pid"][0])
            if memory != self.handed_to or process_state(memory) in ("", "Z"):
                break  # it was ended before it had sent the copy on, and its successor knows nothing of it
            time.sleep(0.002)

    def _agree(self, patience_s: float) -> None:
        """The newest step that memory holds, and that two nodes hold; all ranks learn it after the same step."""
        line, rank = self.board.ranks, self.rank
        self._await_settled(patience_s)
        steps = torch.tensor([int(line["settled"][rank]), int(line["replicated"][rank])])
        if self.control is not None:
            dist.all_reduce(steps, dist.ReduceOp.MIN, group=self.control)
        board: Any = self.board
        board.agreed, board.doubled = steps.tolist()
        self._report_copies(board)
        if board.agreed >= 0 and not self.forgotten and self.leads:
            reach = self.assignment.reach
            forget(reach.addresses[0], self.assignment.generation, FOREVER, reach.secret)
            self.forgotten = True  # what other layouts have left there is not needed any more

    def _report_copies(self, board: "NodeBoard") -> None:
        """Says when copies begin or cease to lie on one node only: then a lost node costs more than it should."""
        self.copies += 1
        alone = board.agreed > board.doubled
        self.single_copies += alone
        if alone and not self.single:
            kept = (
                f"step {board.doubled}" if board.doubled >= 0 else "the newest checkpoint on disk"
            )
            self.log_line(
                f"warning: only one node holds the copies of step {board.agreed}: no other node took them; "
                f"if that node is lost, the run goes back to {kept}"
            )
        if self.single and not alone and board.doubled >= 0:
            self.log_line(f"two nodes hold the copies again, of step {board.doubled}")
        self.single = alone
        if self.ledger is not None:
            self.ledger.copies(board.agreed, board.doubled)


def _present(
    node: node_memory.Node, first: bool, config: Train, rank: int, board: Board, secret: Secret
) -> Present:
    address = node.address
    steps = folders.complete_steps(config.folder / "checkpoints") if rank == 0 else []
    ago = time.monotonic() - int(board.nodes["began_ns"][0]) / 1e9
    return Present(
        address=address,
        host=socket.gethostname(),
        began=time.time() - ago,
        holdings=tuple(ask_holdings(address, secret)) if first else (),
        disk=steps[-1] if steps else 0,
        watch=node.watch,
        life=secrets.randbits(62),
    )


def _give_duty(node: node_memory.Node, agreement: Agreement, config: Train, rank: int) -> None:
    """The node's watch learns who leads from now on, and how patient it is."""
    duty = Duty(
        life=agreement.life,
        leader=agreement.watch,
        leads=rank == 0,
        node=node_name(),
        host=socket.gethostname(),
        world=config.parallel.world(),
        run=str(config.folder.resolve()),
        settings=config.recovery,
        replaced=bool(os.environ.get("CAIRN_JOB_REPLACES")),
        least=int(os.environ.get("CAIRN_JOB_LEAST") or config.parallel.world()),
    )
    fresh = node.folder / f".{DUTY}"
    fresh.write_bytes(msgspec.json.encode(duty))
    fresh.replace(node.folder / DUTY)


def node_name() -> str:
    """As the job calls it, else by torchrun's number."""
    return os.environ.get("CAIRN_NODE") or f"node-{os.environ.get('GROUP_RANK', '0')}"


def _set_out(agreement: Agreement, board: NodeBoard, rank: int, secret: Secret) -> None:
    """The node's memory learns who keeps its copies and what is not gone on from; this rank has its line."""
    own, recall = agreement.addresses[0], agreement.recall
    if agreement.leads:
        keep_at(own, agreement.keeper, secret)
        if recall is not None:
            forget(own, recall.generation, recall.step, secret)
        else:
            forget(own, agreement.generation, -1, secret)
    step = -1 if recall is None or recall.generation != agreement.generation else recall.step
    doubled = _on_two_nodes(recall, step)
    board.set(rank, copied=step, settled=step, replicated=doubled, blocked_ns=0, skipped=0)
    board.set(rank, phase=STARTING, beat_ns=0)
    board.set(rank, step=agreement.back_to, resumed=agreement.back_to, collectives=0)
    board.set(rank, epoch=agreement.life, pid=os.getpid())
    board.agreed, board.doubled = step, doubled


def _on_two_nodes(recall: Recall | None, step: int) -> int:
    """The step that is gone on from, if two nodes hold every rank's copy of it."""
    return step if recall is not None and all(len(c.nodes) > 1 for c in recall.copies) else -1


def _everybody(mine: Any, world: int) -> list[Any]:
    if world == 1:
        return [mine]
    heard: list[Any] = [None] * world
    dist.all_gather_object(heard, mine)
    return heard


def _own_address(hosts: list[str]) -> str:
    """Where other nodes reach this one; loopback if all of them are on this machine."""
    others = [host for host in hosts if host != socket.gethostname()]
    if not others or os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 1))  # sends nothing: asks the routing table
        return probe.getsockname()[0]
