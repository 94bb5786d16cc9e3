"""The actor that is one node of a job on Ray: starts the agent as a process, and answers how it is and what it wrote.

Runs inside Ray's workers. When its actor is killed or its node is lost, the agent and its ranks die with it. Knows
nothing about the job: it is told an argv.
"""

import contextlib
import os
import signal
import subprocess
import tempfile

import psutil

from cairn.cluster.rank import die_with_parent

NODE_ADDRESS = "$NODE_ADDRESS"  # in argv and env: where this node is, which only it knows
CHUNK = 1 << 20  # bytes of the log in one answer


class NodeAgent:
    """One argv at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        descriptor, self.log = tempfile.mkstemp(prefix="cairn-node-", suffix=".log")
        os.close(descriptor)

    def start(self, argv: list[str], env: dict[str, str]) -> int:
        import ray

        here = ray.util.get_node_ip_address()
        argv = [word.replace(NODE_ADDRESS, here) for word in argv]
        env = {name: value.replace(NODE_ADDRESS, here) for name, value in env.items()}
        with open(self.log, "ab") as out:
            # From the thread that lives as long as the actor: the kernel ends the agent with the thread that made it.
            self.process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0,
                env={**os.environ, **env}, preexec_fn=die_with_parent,
            )  # fmt: skip
        return self.process.pid

    def look(self, offset: int) -> tuple[int | None, bytes]:
        """How it ended, if it has, and the log from there on; the end is told only with the last of the log."""
        status = self.process.poll() if self.process is not None else None
        with open(self.log, "rb") as log:
            log.seek(offset)
            data = log.read(CHUNK)
        return (status if len(data) < CHUNK else None), data

    def end(self, kill: bool) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)

    def forget(self) -> None:
        """Before the actor goes: its log file, too."""
        with contextlib.suppress(OSError):
            os.unlink(self.log)

    def pids(self) -> list[int]:
        """The agent and everything below it, for tests."""
        if self.process is None:
            return []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(self.process.pid).children(recursive=True)
            return [self.process.pid, *(process.pid for process in below)]
        return []
