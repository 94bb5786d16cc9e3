"""Nodes with networks of their own, so that one of them can be cut off.

    host: bridge cairnP ---- link n0 | namespace cairnP-0, 10.213.77.1
                       `---- link n1 | namespace cairnP-1, 10.213.77.2        P: this process

A rank enters its node's namespace when CAIRN_NODE_NAMESPACES names them. Needs root and the program `ip`; without them
partitions are skipped with the reason. All is taken down again, whatever happens.
"""

import contextlib
import os
import shutil
import subprocess
import threading
import time
from types import TracebackType
from typing import Self

from cairn.cluster.chaos_faults import NotPermitted
from cairn.cluster.chaos_plan import Fault
from cairn.core.errors import CairnError

NODES = 8
VARIABLE = "CAIRN_NODE_NAMESPACES"  # names by node, with commas; and the interface in each of them
INTERFACE = "cairn0"


class ChaosNetwork:
    """Namespaces for the nodes of one job, or nothing at all where none are wanted."""

    def __init__(self, enabled: bool, nodes: int = NODES) -> None:
        self.wanted, self.nodes = enabled, nodes
        self.tag = f"cairn{os.getpid() % 100000}"
        self.obstacle = ""

    def __enter__(self) -> Self:
        if self.wanted:
            try:
                self._build()
            except NotPermitted as error:
                self.obstacle = error.message
                self._remove()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.wanted and not self.obstacle:
            self._remove()

    def environment(self) -> dict[str, str]:
        if not self.wanted or self.obstacle:
            return {}
        return {VARIABLE: ",".join(self._space(node) for node in range(self.nodes))}

    def inject(self, fault: Fault, target: tuple[str, int]) -> str | None:
        """Cuts a node off for a while; None: it is another kind of fault."""
        if fault.kind != "partition":
            return None
        if self.obstacle:
            raise NotPermitted(self.obstacle)
        kind, node = target
        if kind != "node" or node >= self.nodes:
            raise NotPermitted(f"a partition cuts off a node, not {kind} {node}")
        link = self._link(node)
        _ip("link", "set", link, "down")
        threading.Thread(target=self._mend, args=(link, fault.seconds), daemon=True).start()
        return f"node {node} is cut off for {fault.seconds} s"

    def _mend(self, link: str, seconds: float) -> None:
        time.sleep(seconds)
        with contextlib.suppress(CairnError):  # the job may be over, and the link gone
            _ip("link", "set", link, "up")

    def _space(self, node: int) -> str:
        return f"{self.tag}-{node}"

    def _link(self, node: int) -> str:
        return f"{self.tag}n{node}"

    def _build(self) -> None:
        _ip("link", "add", self.tag, "type", "bridge")
        _ip("link", "set", self.tag, "up")
        for node in range(self.nodes):
            space, link = self._space(node), self._link(node)
            _ip("netns", "add", space)
            _ip("link", "add", link, "type", "veth", "peer", "name", INTERFACE, "netns", space)
            _ip("link", "set", link, "master", self.tag, "up")
            _ip("-n", space, "addr", "add", f"10.213.77.{node + 1}/24", "dev", INTERFACE)
            _ip("-n", space, "link", "set", INTERFACE, "up")
            _ip("-n", space, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for node in range(self.nodes):
            for words in (("link", "del", self._link(node)), ("netns", "del", self._space(node))):
                with contextlib.suppress(NotPermitted):
                    _ip(*words)
        with contextlib.suppress(NotPermitted):
            _ip("link", "del", self.tag)


def _ip(*words: str) -> None:
    if shutil.which("ip") is None:
        raise NotPermitted("the program ip is not installed", hint="apt install iproute2")
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise NotPermitted(f"ip {' '.join(words)}: {done.stderr.strip()}")
