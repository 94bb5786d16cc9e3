"""One node of a launched job: a process that keeps copies in memory and outlives the ranks. A program.

    torchrun (the node's launcher) --+-- rank 0, rank 1      die and come again
             ^ followed              '..                     .
             '---------- node memory  <--- copies, beats ---'     ends when the launcher does, and leaves nothing

Started by the first rank of a node that finds none. Besides holding copies (`peer_agent`) it watches the ranks
(`node_watch`): a launcher sees only processes that exit. Knows neither torch nor what is trained.
"""

import argparse
import contextlib
import errno
import os
import select
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from cairn.core.errors import CairnError
from cairn.core.job_ledger_files import FOLDER, METRICS
from cairn.core.shared_secret import Secret
from cairn.train.checkpoint.peer_agent import Agent, Doors
from cairn.train.recovery.metrics_page import serve_metrics
from cairn.train.recovery.node_watch import NodeWatch
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.status_board import Board
from cairn.train.recovery.watch_link import DOOR

MOST_RANKS = 8192  # of a job; the file is sparse
SOCKET, BOARD, ADDRESS, LOG, SECRET = "agent", "board", "address", "log", "secret"
START_S = 60.0
LET_GO_S = 10.0
TICK_S = 0.2
LAUNCHER, SHARED = "CAIRN_NODE_LAUNCHER", "CAIRN_NODE_SHARED"  # in the environment of a rank


class NodeMemoryMissing(CairnError):
    """The process that keeps copies did not start."""


class Node(NamedTuple):
    """Where the ranks of a node find their memory."""

    folder: Path
    launcher: int  # the process whose life is the node's life
    shared: bool = False  # the launcher has other nodes, too: it does not end with this one

    @property
    def path(self) -> str:
        return str(self.folder / SOCKET)

    @property
    def address(self) -> str:
        return (self.folder / ADDRESS).read_text()

    @property
    def watch(self) -> str:
        """Where the watch of this node is reached by those of others."""
        return (self.folder / DOOR).read_text()

    @property
    def secret(self) -> Secret | None:
        """What the memory of this node asks others for; None: it does not run yet."""
        if self.folder.exists():
            _check_ours(self.folder)
        return secret_in(self.folder)

    def board(self) -> Board:
        return Board(MOST_RANKS, 1, self.folder / BOARD)

    def answers(self) -> bool:
        """One that was killed may still take connections while its threads end: it does not count."""
        if not (self.folder / ADDRESS).exists() or not self.lives():
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(1.0)
            with contextlib.suppress(OSError):
                link.connect(self.path)
                return True
        return False

    def lives(self) -> bool:
        pid = int(self.board().nodes["pid"][0])
        return process_state(pid) not in ("", "Z")


def node_here() -> Node:
    """The node of this rank: what its launcher started. `cluster.rank` stands between the two and says which it is."""
    launcher = int(os.environ.get(LAUNCHER) or os.getppid())
    return _node(launcher, os.environ["CAIRN_NODE"] if os.environ.get(SHARED) else "")


def node_of_driver(number: int) -> Node:
    """A node of this process, which has several of them; its folder is made."""
    node = _node(os.getpid(), f"node-{number}")
    node.folder.mkdir(mode=0o700, exist_ok=True)
    _check_ours(node.folder)
    return node


def _node(launcher: int, name: str) -> Node:
    """`name`: of the node, where its launcher is the driver of several."""
    born = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    folder = f"cairn-node-{os.getuid()}-{launcher}-{born}"  # process numbers are used again
    home = Path(tempfile.gettempdir()) / (f"{folder}-{name}" if name else folder)
    return Node(home, launcher, shared=bool(name))


def secret_in(folder: Path) -> Secret | None:
    path = folder / SECRET
    return Secret(path.read_bytes()) if path.exists() else None


def find(
    node: Node, first: bool, host: str, settings: Recovery, run: Path, serves: bool, secret: Secret
) -> None:
    """Until the node's memory answers; the `first` rank of the node starts it if it does not run yet."""
    if first and not node.answers():
        start(node, host, settings, run if serves else None, secret)
    deadline = time.monotonic() + START_S
    while not node.answers():
        if time.monotonic() > deadline:
            words = (node.folder / LOG).read_text()[-500:] if (node.folder / LOG).exists() else ""
            raise NodeMemoryMissing(
                f"the memory of this node did not answer within {START_S:.0f} s: {words.strip()}",
                hint="recovery.on = false trains without copies in memory",
            )
        time.sleep(0.02)


def start(node: Node, host: str, settings: Recovery, run: Path | None, secret: Secret) -> None:
    node.folder.mkdir(mode=0o700, exist_ok=True)
    _check_ours(node.folder)
    _write_secret(node.folder, secret)
    argv = [
        sys.executable,
        "-m",
        "cairn.train.recovery.node_memory",
        str(node.folder),
        "--host",
        host,
        "--follow",
        str(node.launcher),
        "--silent",
        str(settings.silent_s),
    ]
    if node.shared:
        argv.append("--shared")
    if run is not None and settings.metrics_port:
        argv += ["--metrics", str(settings.metrics_port), "--run", str(run)]
    _keep_descriptors()
    null = os.open(os.devnull, os.O_RDWR)
    log = os.open(node.folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:  # not the rank's output: its reader waits for the end
        files = [(os.POSIX_SPAWN_DUP2, file, n) for n, file in enumerate((null, null, log))]
        os.posix_spawn(argv[0], argv, dict(os.environ), file_actions=files, setsid=True)
    finally:
        os.close(null)
        os.close(log)


def _keep_descriptors() -> None:
    """Makes the sockets of torch this process's own.

    A memory that inherited them would keep them open after this rank's death, and the ranks at the other ends would
    not learn of it.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing is closed by now
            if int(name) > 2:
                os.set_inheritable(int(name), False)


def _check_ours(folder: Path) -> None:
    """Its name can be guessed: another user may have made it first, to read what is written there."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise NodeMemoryMissing(
            f"{folder} belongs to user {status.st_uid} with mode {stat.filemode(status.st_mode)}: "
            "others could read what is written there",
            hint="remove it, or set TMPDIR to a folder of your own",
        )


def _write_secret(folder: Path, secret: Secret) -> None:
    """A file of the owner's, because command lines and environments can be listed."""
    fresh = folder / f".{SECRET}"
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret.reveal())
    fresh.replace(folder / SECRET)


# -- the program -----------------------------------------------------------------------------------


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="cairn.train.recovery.node_memory")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--follow", type=int, required=True)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--silent", type=float, default=3.0)
    parser.add_argument("--metrics", type=int, default=0)
    parser.add_argument("--run", type=Path)
    options = parser.parse_args(words)
    try:
        launcher = os.pidfd_open(options.follow)
    except ProcessLookupError:
        shutil.rmtree(options.folder, ignore_errors=True)
        return 0
    try:
        _live(options, launcher)
    finally:
        shutil.rmtree(options.folder, ignore_errors=True)
    return 0


def _live(options: argparse.Namespace, launcher: int) -> None:
    folder = options.folder
    before = (folder / ADDRESS).read_text() if (folder / ADDRESS).exists() else ":0"
    doors = _doors(str(folder / SOCKET), options.host, int(before.rpartition(":")[2]))
    board = Board(MOST_RANKS, 1, folder / BOARD)
    secret = secret_in(folder)
    agent = Agent(0, doors, None, board, secret, _log)
    threading.Thread(target=agent.run, daemon=True).start()
    launcher_alone = None if options.shared else options.follow
    watch = NodeWatch(folder, board, options.host, launcher_alone, options.silent, secret)
    fresh = folder / f".{ADDRESS}"
    fresh.write_text(doors.address)
    fresh.replace(folder / ADDRESS)
    if options.metrics:
        with contextlib.suppress(OSError):  # the port was taken; copies matter more
            serve_metrics(options.run / FOLDER / METRICS, options.metrics)
    poll = select.poll()
    poll.register(launcher, select.POLLIN)
    while not poll.poll(TICK_S * 1e3) and not watch.left:
        watch.tick()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _doors(path: str, host: str, port: int) -> Doors:
    """At the address of the one before, whose threads may take a moment to let go of it."""
    deadline = time.monotonic() + LET_GO_S
    while True:
        Path(path).unlink(missing_ok=True)
        try:
            return Doors.open(path, host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
