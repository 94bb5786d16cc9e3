"""Process of a rank on a local node, from fork to its last message.

    join the others -> run_launched -> "said", "record", ... then "done" | "paused" | "failed" through the pipe

A node is a group of ranks with a memory of its own (`node_memory`). The kernel ends a rank whose driver is gone. Its
errors are those of any rank (`launch`).
"""

import contextlib
import ctypes
import multiprocessing
import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cairn.core.die_with_parent import die_with_parent
from cairn.train.config import Train
from cairn.train.launch import failure_of
from cairn.train.recovery.node_memory import LAUNCHER, SHARED
from cairn.train.stop_signals import obey_parent

Word = Literal["said", "record", "done", "paused", "failed"]
NAMESPACES = "CAIRN_NODE_NAMESPACES"  # of the nodes, by name, with commas between them
CLONE_NEWNET = 0x40000000
LEAVE_S = 5.0


class Placement(NamedTuple):
    """All that a rank process is given; inherited by fork, so nothing is pickled."""

    config: Train
    rank: int
    node: int
    local: int  # its number on the node
    life: int  # how often the ranks were started before
    least: int  # ranks with which the run could go on
    driver: int  # process id
    folder: Path  # where the ranks of a life meet
    device: str

    def environment(self) -> dict[str, str]:
        """Environment as a multi-node launcher would set it."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.config.parallel.world()),
            "LOCAL_RANK": str(self.local),
            "CAIRN_NODE": node_name(self.node),
            LAUNCHER: str(self.driver),
            SHARED: "1",
            "CAIRN_JOB_ATTEMPT": str(self.life),
            "CAIRN_JOB_REPLACES": "driver",
            "CAIRN_JOB_LEAST": str(self.least),
        }


class LocalRank:
    """The driver's handle of a rank: its process, its pipe, its last message."""

    def __init__(self, process: Any, pipe: Connection, node: int) -> None:
        self.process, self.pipe, self.node = process, pipe, node
        self.word: str | None = None
        self.value: Any = None

    @property
    def over(self) -> bool:
        return self.word is not None

    def listen(self, log_line: Callable[[str], None], on_record: Callable[[Any], None]) -> None:
        """Passes on its text and its steps' records; notes its last message, or that it ended without one."""
        try:
            while not self.over and self.pipe.poll():
                word, value = self.pipe.recv()
                if word == "said":
                    log_line(value)
                elif word == "record":
                    on_record(value)
                else:
                    self.word, self.value = word, value
        except (EOFError, OSError):
            self.process.join(LEAVE_S)
            self.word, self.value = "gone", self.process.exitcode


def node_name(node: int) -> str:
    return f"node-{node}"


def start_rank(placement: Placement) -> LocalRank:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_rank_main, args=(sender, placement))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
        process.start()
    sender.close()
    return LocalRank(process, receiver, placement.node)


def end_ranks(ranks: list[LocalRank]) -> None:
    """End the ranks: finished ones exit by themselves, all others are killed, also stopped ones."""
    for rank in ranks:
        if rank.process.is_alive():
            if rank.word in ("done", "paused"):
                rank.process.join(LEAVE_S)
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()


def _rank_main(sender: Connection, placement: Placement) -> None:
    from cairn.train.recovery.guarded_loop import Paused
    from cairn.train.recovery.launched import run_launched

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    enter_network(placement.node)
    os.environ.update(placement.environment())
    obey_parent()
    die_with_parent()

    word: tuple[Word, Any]
    try:
        _share_cores(placement)
        address = f"file://{placement.folder}/rendezvous-{placement.life}"
        result = run_launched(
            placement.config,
            placement.rank,
            placement.device,
            log_line=lambda text: sender.send(("said", text)),
            on_record=lambda record: sender.send(("record", record)),
            address=address,
        )
        word = ("done", result if placement.rank == 0 else None)
    except Paused:
        word = ("paused", None)
    except BaseException as error:  # noqa: BLE001  the driver decides what it means
        word = ("failed", failure_of(placement.rank, error))
    with contextlib.suppress(BrokenPipeError):
        sender.send(word)
    sender.close()
    os._exit(0 if word[0] != "failed" else 1)  # threads of a broken group must not keep it


def _share_cores(placement: Placement) -> None:
    import torch

    if placement.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // placement.config.parallel.world()))


def enter_network(node: int) -> None:
    """Into the network namespace of this rank's node, where fault injection has made one."""
    names = os.environ.get(NAMESPACES)
    if not names:
        return
    descriptor = os.open(f"/run/netns/{names.split(',')[node]}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"the network of node {node} cannot be entered")
    os.close(descriptor)
    os.environ["GLOO_SOCKET_IFNAME"] = "cairn0"
