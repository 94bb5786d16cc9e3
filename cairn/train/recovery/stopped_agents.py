"""Agents that are stopped (SIGSTOP, a debugger) hold up every copy: they are ended, and others take their places."""

import os
import signal
import time
from collections.abc import Callable

from cairn.train.recovery.board import Board
from cairn.train.recovery.process_state import process_state


class StoppedAgents:
    def __init__(self, board: Board, say: Callable[[str], None]) -> None:
        self.board, self.say = board, say
        self.since: dict[int, float] = {}  # node -> when it was first seen so

    def end(self, patience_s: float) -> None:
        """Those that have been stopped for so long; whoever started them starts others."""
        now = time.monotonic()
        for node, pid in enumerate(map(int, self.board.nodes["pid"])):
            if process_state(pid) != "T":
                self.since.pop(node, None)
            elif now - self.since.setdefault(node, now) >= patience_s:
                os.kill(pid, signal.SIGKILL)
                self.say(
                    f"warning: the agent of node {node} was stopped; another one takes its place"
                )
