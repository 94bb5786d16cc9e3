"""A rank of a launched job (torchrun under `cairn launch`) that survives the loss of its node.

    node a: launcher -- ranks .. node memory  <== copies over TCP ==>  node memory .. ranks -- launcher :node b

The launcher starts ranks anew and replaces nodes; what is added here is where their state comes from. All ranks meet,
decide together from which step they go on (`resume_agreement`), read it from memory, and train with `GuardedLoop`'s
copies and comparisons (`launched_loop`). No process decides alone; the watch of rank 0's node finds who hangs and who
is slow (`node_watch`).
"""

import os
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch.distributed as dist

from cairn.core.shared_secret import Secret, secret_from
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.peer_restore import Reach, Recall, ask_holdings, forget, keep_at
from cairn.train.checkpoint.save import STORAGE_TIMEOUT
from cairn.train.config import Train
from cairn.train.launch import join_group, reporting_lost_peers
from cairn.train.metrics_log import Record
from cairn.train.recovery import node_memory
from cairn.train.recovery.guarded_loop import Assignment, Heartbeat
from cairn.train.recovery.launched_ledger import LaunchedLedger
from cairn.train.recovery.launched_loop import LaunchedLoop, NodeBoard
from cairn.train.recovery.node_report import Duty
from cairn.train.recovery.node_watch import DUTY
from cairn.train.recovery.resume_agreement import Agreement, Arrived, Present, decide, secret_of
from cairn.train.recovery.stall_note import stall_path
from cairn.train.recovery.stall_writer import StallWriter
from cairn.train.recovery.status_board import STARTING, Board
from cairn.train.run import run
from cairn.train.run_lock import exclusive_run

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
    leaving = _join(config, rank, world, device, address)
    own = _own_node(world)
    own.find_memory(config, rank)
    board = NodeBoard(own.node)
    agreement = decide(_everybody(_present(own, config, rank, board), world), rank)
    _set_out(agreement, board, rank, own.secret)
    stall = StallWriter(stall_path(own.node.folder, rank), config.recovery.stuck_s)
    heartbeat = Heartbeat(board, rank, config.recovery.heartbeat_s, stall)
    heartbeat.start()
    if agreement.leads:
        _give_duty(own.node, agreement, config, rank)
    make_loop = _loop_maker(own, agreement, config, rank, board)
    with reporting_lost_peers(rank, "the launcher starts it again, and it goes on from memory"):
        with _only_run(config, rank):
            result = run(config, rank, log_line, on_record, make_loop)
        heartbeat.stop()
        if leaving is not None:
            # In order: threads of a group that is left alone end the process with an error.
            dist.barrier(leaving)
            dist.destroy_process_group()
        return result


class OwnNode(NamedTuple):
    """The node of this rank, and how others reach its memory."""

    node: node_memory.Node
    first: bool  # of the node's ranks: it speaks for the node
    host: str
    secret: Secret

    def find_memory(self, config: Train, rank: int) -> None:
        """The first rank starts it where there is none; the others wait for it."""
        recovery, folder = config.recovery, config.folder
        node_memory.find(self.node, self.first, self.host, recovery, folder, rank == 0, self.secret)


def _join(config: Train, rank: int, world: int, device: str, address: str) -> Any:
    """Join the others; the group in which they leave together, or None for a rank that is alone."""
    if world == 1:
        return None
    join_group(rank, world, address, device, config.recovery.stuck_s)
    # Others wait in it while rank 0 exports, which may take longer than any collective.
    return dist.new_group(backend="gloo", timeout=STORAGE_TIMEOUT)


def _own_node(world: int) -> OwnNode:
    node = node_memory.node_here()
    job_secret = secret_from(os.environ) or node.secret
    arrived = _everybody(Arrived(socket.gethostname(), job_secret, Secret.fresh()), world)
    return OwnNode(
        node=node,
        first=int(os.environ.get("LOCAL_RANK", "0")) == 0,
        host=_own_address([one.host for one in arrived]),
        secret=secret_of(arrived),
    )


def _loop_maker(
    own: OwnNode, agreement: Agreement, config: Train, rank: int, board: "NodeBoard"
) -> "Callable[..., LaunchedLoop]":
    world = config.parallel.world()
    reach = Reach(0, own.node.path, agreement.addresses, own.secret)

    def revive() -> None:
        """The node's memory was killed: another one, empty, in its place."""
        own.find_memory(config, rank)
        _give_duty(own.node, agreement, config, rank)
        keep_at(agreement.addresses[0], agreement.keeper, own.secret)

    return partial(
        LaunchedLoop,
        board=board,
        assignment=Assignment(rank, world, reach, agreement.generation, agreement.recall),
        leads=agreement.leads,
        ledger=LaunchedLedger(config.folder, agreement, world, board) if rank == 0 else None,
        revive=revive if own.first else None,
    )


def _only_run(config: Train, rank: int) -> AbstractContextManager[None]:
    """No other job writes to the folder; the driver of the nodes of one machine has made sure of it."""
    if rank != 0 or os.environ.get(node_memory.SHARED):
        return nullcontext()
    config.folder.mkdir(parents=True, exist_ok=True)
    name = os.environ.get("CAIRN_JOB_FAILURES") or os.environ.get("TORCHELASTIC_RUN_ID", "")
    return exclusive_run(config.folder, name)


def _present(own: OwnNode, config: Train, rank: int, board: Board) -> Present:
    node, address = own.node, own.node.address
    steps = folders.complete_steps(config.folder / "checkpoints") if rank == 0 else []
    ago = time.monotonic() - int(board.nodes["began_ns"][0]) / 1e9
    return Present(
        address=address,
        host=socket.gethostname(),
        began=time.time() - ago,
        holdings=tuple(ask_holdings(address, own.secret)) if own.first else (),
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
    """Node name from the job, else from torchrun's group rank."""
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
    back_to = agreement.back_to
    board.set(rank, measured=back_to, step=back_to, resumed=back_to, collectives=0)
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
    """Address of this node for other nodes; loopback if all are on this machine."""
    others = [host for host in hosts if host != socket.gethostname()]
    if not others or os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((others[0], 1))  # sends nothing: asks the routing table
        return probe.getsockname()[0]
