"""The actor that is one node of a job on Ray: starts the agent as a process, and answers how it is and what it wrote.

Runs inside Ray's workers. When its actor is killed or its node is lost, the agent and its ranks die with it. Knows
nothing about the job: it gets an argv.
"""

import contextlib
import os
import signal
import subprocess
import tempfile
import uuid

import psutil

from cairn.cluster.leftover_processes import end_leftovers, mark_of
from cairn.cluster.orphan_reaper import OrphanReaper
from cairn.core.die_with_parent import die_with_parent

# A word for torchrun: where this node is, which only it knows.
NODE_ADDRESS = "--local-addr=$NODE_ADDRESS"
CHUNK = 1 << 20  # bytes of the log in one answer
START = "CAIRN_NODE_START"  # of the environment: one start of one node


class NodeAgent:
    """Ray actor that runs one command at a time on its node."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.mark: dict[str, str] = {}
        self.reaper: OrphanReaper | None = None
        # Without a name: it goes with the actor, however that ends; the lines are in the job's record by then.
        self.log = tempfile.TemporaryFile("a+b")  # noqa: SIM115  as long as the actor

    def start(self, argv: list[str], env: dict[str, str], folder: str) -> int:
        """`folder` is where the job was launched, for relative paths; another machine need not have it."""
        import ray

        here = ray.util.get_node_ip_address()
        machine = ray.get_runtime_context().get_node_id()[:12]  # its name in the inventory
        argv = [f"--local-addr={here}" if word == NODE_ADDRESS else word for word in argv]
        self.mark = mark_of(env)
        # Not what all starts of this node have in common: the next one may be up before this one's reaper looks.
        mine = {START: uuid.uuid4().hex}
        self.reaper = OrphanReaper(mine)
        # From the thread that lives as long as the actor: the kernel ends the agent with the thread that made it.
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            process_group=0,
            env={**os.environ, "CAIRN_MACHINE": machine, **env, **mine},
            preexec_fn=die_with_parent,
            cwd=folder if os.path.isdir(folder) else None,
        )
        return self.process.pid

    def look(self, offset: int) -> tuple[int | None, bytes]:
        """Exit status (None while it runs) and the log from `offset`; the status comes with the end of the log."""
        status = self.process.poll() if self.process is not None else None
        if status is not None:
            end_leftovers(self.mark)
        data = os.pread(self.log.fileno(), CHUNK, offset)
        return (status if len(data) < CHUNK else None), data

    def end(self, kill: bool) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        if kill:
            self.process.wait()
            end_leftovers(self.mark)

    def pids(self) -> list[int]:
        """The agent and everything below it, for tests."""
        if self.process is None:
            return []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [self.process.pid, *(process.pid for process in below)]
        return []
