"""Hosts made of network namespaces: each its own interface and rate, joined by a bridge.

    h0 --eth0-- [p0 br0 p1] --eth0-- h1        rates by tbf on both ends

Needs root, `ip` and `tc`; `reason()` says why not. Names are global to the machine, so they carry the
process id, and everything is taken down at the end.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

NETWORK = 0x40000000  # CLONE_NEWNET


def reason() -> str | None:
    """Why there can be no namespaces here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"no `{tool}` here (package iproute2)"
    name = f"cairn-try-{os.getpid()}"
    if _quiet("ip", "netns", "add", name):
        return "this machine does not permit network namespaces"
    _quiet("ip", "netns", "del", name)
    return None


@contextmanager
def hosts(rates: Sequence[str]) -> Iterator[list[str]]:
    """Names of namespaces, one for each rate (such as 200mbit); address 10.77.0.i+1 on eth0."""
    mark = f"cd{os.getpid() % 100000}"
    switch, names = f"{mark}sw", [f"{mark}h{place}" for place in range(len(rates))]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for place, (name, rate) in enumerate(zip(names, rates, strict=True)):
            _host(switch, name, place, rate)
        yield names
    finally:
        for name in [*names, switch]:
            _quiet("ip", "netns", "del", name)


def enter(name: str) -> None:
    """This process lives there from now on."""
    with Path(f"/var/run/netns/{name}").open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"setns {name}")


def _host(switch: str, name: str, place: int, rate: str) -> None:
    port = f"p{place}"
    _ip("netns", "add", name)
    _ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", name, "addr", "add", f"10.77.0.{place + 1}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    for where, device in ((name, "eth0"), (switch, port)):
        limit = ("tbf", "rate", rate, "burst", "32kb", "latency", "50ms")
        _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *limit)


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, timeout=20)


def _quiet(*words: str) -> int:
    return subprocess.run(words, check=False, capture_output=True, timeout=20).returncode
