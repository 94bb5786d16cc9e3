"""A run on this machine that survives the death of any process below the first one.

    cairn train  (root: almost nothing happens here, so almost nothing can go wrong)
     |-- agent of node 0, agent of node 1 ...     memory of copies; a new one is started in its place
     '-- supervisor                               a new one takes over; the ranks start again from memory
          '-- rank 0 .. rank n-1

`recovery.nodes` groups of ranks stand for machines: each has an agent, and copies go to another one's. If the root
itself is killed all end with it, by the kernel, and the same command goes on from disk.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from cairn.core.die_with_parent import die_with_parent
from cairn.core.errors import CairnError, ConfigError
from cairn.core.job_ledger import FOLDER, METRICS
from cairn.core.shared_secret import Secret
from cairn.train.checkpoint.peer_agent import Agent, Doors
from cairn.train.checkpoint.peer_placement import keepers
from cairn.train.config import Train
from cairn.train.launch import RankFailed
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.board import STOP, Board
from cairn.train.recovery.metrics_page import serve_metrics
from cairn.train.recovery.process_state import process_state
from cairn.train.recovery.rank_process import RankFunction
from cairn.train.recovery.supervisor import Site, Supervisor, ignore_interrupts
from cairn.train.recovery.templates import Fits, fitting

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def run_supervised(
    config: Train, train: RankFunction, device: str = "cpu", say: Callable[[str], None] = print
) -> Any:
    """What rank 0 returned, however many processes died on the way."""
    _check(config)
    with tempfile.TemporaryDirectory(prefix="cairn-") as folder, _forwarding() as board_of:
        root = Root(config, train, device, say, Path(folder))
        board_of.append(root.board)
        try:
            return root.run()
        finally:
            root.end()


class Root:
    def __init__(
        self, config: Train, train: RankFunction, device: str, say: Callable[[str], None], folder: Path
    ) -> None:  # fmt: skip
        self.config, self.train, self.device, self.say = config, train, device, say
        settings = config.recovery
        count = settings.nodes + settings.spare_nodes
        self.context = multiprocessing.get_context("fork")
        self.board = Board(config.parallel.world(), count)
        self.doors = [Doors.open(str(folder / f"node-{node}")) for node in range(count)]
        self.keepers = keepers(list(range(count)))
        self.site = Site(
            str(folder), tuple(d.path for d in self.doors), tuple(d.address for d in self.doors), os.getpid(),
            uuid.uuid4().hex, Secret.fresh(),
        )  # fmt: skip
        self.agents: list[Any] = []
        self.supervisor: Any = None
        _adopt(True)  # ranks of a killed supervisor are ours to bury

    def run(self) -> Any:
        config = self.config
        config.folder.mkdir(parents=True, exist_ok=True)
        self.agents = [self._start_agent(node) for node in range(len(self.doors))]
        for _ in range(config.recovery.restarts + 1):
            pipe = self._start_supervisor()
            word = self._watch(pipe)
            if word is not None:
                fine, value = word
                if fine:
                    return value
                raise value
            self._bury()
            self.say("warning: the supervisor was ended; another one takes over")
        raise RankFailed("the supervisor was ended too often", hint="see dmesg: is memory short?")

    def _watch(self, pipe: Connection) -> tuple[bool, Any] | None:
        """The supervisor's last word; None if it ended without one. Agents that end are started again."""
        stopped = 0
        while True:
            wait([pipe, *[agent.sentinel for agent in self.agents]], timeout=1.0)
            stopped = stopped + 1 if process_state(self.supervisor.pid) == "T" else 0
            if stopped > self.config.recovery.silent_s:
                self.supervisor.kill()  # stopped, not dead: it would keep everybody waiting
            for node, agent in enumerate(self.agents):
                if not agent.is_alive():
                    agent.join()
                    self._not_too_often(node)
                    self.agents[node] = self._start_agent(node)
            if pipe.poll():
                try:
                    return pipe.recv()
                except EOFError:
                    self.supervisor.join()
                    return None

    def _not_too_often(self, node: int) -> None:
        """An agent that cannot live must not be started a thousand times a second."""
        began = int(self.board.nodes["began_ns"][node])
        if time.monotonic_ns() - began < 1e9:
            time.sleep(0.2)

    def _start_agent(self, node: int) -> Any:
        keeper = self.keepers[node]
        address = None if keeper is None else self.doors[keeper].address
        metrics = self.config.recovery.metrics_port if node == 0 else 0

        def main() -> None:
            ignore_interrupts()
            die_with_parent()
            with contextlib.suppress(OSError):  # somebody took the port; copies matter more
                if metrics:
                    serve_metrics(self.config.folder / FOLDER / METRICS, metrics)
            Agent(node, self.doors[node], address, self.board, self.site.secret).run()

        return self._fork(main)

    def _start_supervisor(self) -> Connection:
        receiver, sender = self.context.Pipe(duplex=False)

        def main() -> None:
            ignore_interrupts()
            die_with_parent()
            self.board.head["supervisor"][0] = os.getpid()
            try:
                fits = layouts_that_fit(self.config)
                result = Supervisor(
                    self.config, self.board, self.site, self.device, self.train, fits, self.say
                ).run()
                sender.send((True, result))
            except BaseException as error:  # noqa: BLE001  the root raises it
                known = error if isinstance(error, CairnError) else RankFailed(_words(error))
                sender.send((False, known))

        self.supervisor = self._fork(main)
        sender.close()
        return receiver

    def _fork(self, main: Callable[[], None]) -> Any:
        process = self.context.Process(target=main)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        return process

    def _bury(self) -> None:
        """Ranks whose supervisor is gone were killed by the kernel and are our children now."""
        deadline = time.monotonic() + 10
        for pid in {int(pid) for pid in self.board.ranks["pid"] if pid}:
            while time.monotonic() < deadline:
                try:
                    if os.waitpid(pid, os.WNOHANG)[0] == pid:
                        break
                except ChildProcessError:
                    break
                time.sleep(0.01)

    def end(self) -> None:
        everybody = [self.supervisor, *self.agents]
        for process in everybody:
            if process is not None and process.is_alive():
                process.kill()
        for process in everybody:
            if process is not None:
                process.join()
        self._bury()
        _adopt(False)
        for doors in self.doors:
            doors.close()


def layouts_that_fit(config: Train) -> Fits:
    import msgspec

    from cairn.train.prepare import spec_of
    from cairn.train.refuse import check_layout

    spec = spec_of(config.model)

    def check(layout: Layout) -> None:
        other = msgspec.structs.replace(config, parallel=layout)
        check_layout(other, spec, layout.world())

    return fitting(check)


def _check(config: Train) -> None:
    world, settings = config.parallel.world(), config.recovery
    if settings.nodes > world:
        raise ConfigError(
            f"recovery.nodes {settings.nodes} for {world} ranks",
            hint=f"each node has at least one rank: at most {world}",
        )
    if world % settings.nodes:
        raise ConfigError(
            f"{world} ranks do not divide over recovery.nodes {settings.nodes}",
            hint="every node has as many ranks as the others",
        )
    if settings.metrics_port:
        try:
            socket.create_server(("127.0.0.1", settings.metrics_port)).close()
        except OSError as error:
            raise ConfigError(
                f"recovery.metrics_port {settings.metrics_port} cannot be used: {error.strerror}",
                hint="choose another one, or 0 for none",
            ) from None


def _adopt(orphans: bool) -> None:
    """Whether processes whose parent has ended become children of this one."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(SUBREAPER, int(orphans))


def _words(error: BaseException) -> str:
    import traceback

    return "the supervisor failed\n" + "".join(traceback.format_exception(error)).rstrip()


@contextmanager
def _forwarding() -> "Iterator[list[Board]]":
    """Ctrl-C and SIGTERM end the ranks in order, with a checkpoint; the root waits for them."""
    boards: list[Board] = []
    if threading.current_thread() is not threading.main_thread():
        yield boards
        return

    def stop(number: int, frame: FrameType | None) -> None:
        for board in boards:
            board.order(STOP)

    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, stop),
    }
    try:
        yield boards
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
