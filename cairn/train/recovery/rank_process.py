"""One rank of a supervised run, from fork to its last word.

    sign of life -> join the others -> train (GuardedLoop) -> "done" | "paused" | "failed" through the pipe

A rank that loses its supervisor is ended by the kernel. What it says when it fails is what `launch` says of any rank.
"""

import ctypes
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from cairn.core.die_with_parent import die_with_parent
from cairn.train.config import Train
from cairn.train.launch import failure_of, join_group
from cairn.train.recovery.board import STARTING, Board
from cairn.train.recovery.guarded_loop import GuardedLoop, Heart, Paused, Post
from cairn.train.recovery.stall_note import stall_path
from cairn.train.recovery.stall_writer import StallWriter

Word = Literal["done", "paused", "failed"]
NAMESPACES = "CAIRN_NODE_NAMESPACES"  # of the nodes, by name, with commas between them
CLONE_NEWNET = 0x40000000
RankFunction = Callable[[Train, int, Callable[..., Any]], Any]
"""(config, rank, what makes the loop) -> what rank 0 returns; called when the process group exists"""


class Rank:
    """The supervisor's hold on a rank: its process, its pipe, its last word."""

    def __init__(self, process: Any, pipe: Connection, node: int) -> None:
        self.process, self.pipe, self.node = process, pipe, node
        self.word: str | None = None
        self.value: Any = None

    @property
    def over(self) -> bool:
        return self.word is not None

    def listen(self) -> None:
        """Its last word, or that it ended without one."""
        if self.over:
            return
        try:
            if self.pipe.poll():
                self.word, self.value = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            self.word, self.value = "gone", self.process.exitcode


class Assignment:
    """All that a rank process is given; inherited by fork, so nothing is pickled."""

    def __init__(
        self, config: Train, post: Post, board: Board, epoch: int, folder: Path, device: str,
        train: RankFunction,
    ) -> None:  # fmt: skip
        """`folder`: where the ranks meet, and where one that stands still leaves a note."""
        self.config, self.post, self.board, self.epoch = config, post, board, epoch
        self.folder, self.device, self.train = folder, device, train

    @property
    def address(self) -> str:
        """Of the rendezvous: every epoch has its own."""
        return f"file://{self.folder}/rendezvous-{self.epoch}"


def rank_main(sender: Connection, given: Assignment) -> None:
    post, board = given.post, given.board
    enter_network(post.reach.node)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    die_with_parent()
    board.set(post.rank, pid=os.getpid(), epoch=given.epoch, phase=STARTING)
    settings = given.config.recovery
    stall = StallWriter(stall_path(given.folder, post.rank), settings.stuck_s)
    heart = Heart(board, post.rank, settings.heartbeat_s, stall)
    heart.start()
    word: tuple[Word, Any]
    try:
        word = ("done", _work(given))
    except Paused:
        word = ("paused", board.ranks["step"][post.rank].item())
    except BaseException as error:  # noqa: BLE001  the supervisor decides what it means
        word = ("failed", failure_of(post.rank, error))
    sender.send(word)
    sender.close()
    os._exit(0 if word[0] != "failed" else 1)  # threads of a broken group must not keep it


def _work(given: Assignment) -> Any:
    import torch
    import torch.distributed as dist

    post = given.post
    if given.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // post.world))
    if post.world > 1:
        hang_s = given.config.recovery.stuck_s
        join_group(post.rank, post.world, given.address, given.device, hang_s)
    make_loop = partial(GuardedLoop, board=given.board, post=post)
    result = given.train(given.config, post.rank, make_loop)
    if post.world > 1:
        dist.barrier()
    return result if post.rank == 0 else None


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


def start_rank(given: Assignment, node: int) -> Rank:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=rank_main, args=(sender, given))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: fork with threads
        process.start()
    sender.close()
    return Rank(process, receiver, node)


def end_ranks(ranks: list[Rank]) -> None:
    """Those that are done may leave by themselves; all others are killed, stopped ones too."""
    for rank in ranks:
        if rank.process.is_alive():
            if rank.word in ("done", "paused"):
                rank.process.join(5)
            rank.process.kill()
    for rank in ranks:
        rank.process.join()
        rank.pipe.close()
