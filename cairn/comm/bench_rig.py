"""Several hosts in one kernel: network namespaces behind a bridge, with the rate of a real link.

    host 0 [eth0] --tbf-- bridge --tbf-- [eth0] host 1        10.77.0.1, 10.77.0.2, ...
                             |
                           host 2 ...

What is behind a shaped link takes the time the link takes, whatever else the machine does: a rate is measured well on a
busy computer, where a loopback figure means nothing. A namespace belongs to a process that does nothing; when this
process ends, however it ends, they end, and namespaces, links and rates are gone with them. Needs root (or
CAP_NET_ADMIN), `ip`, `tc` and `nsenter`; `why_not` says what is missing. Latency (`delay_ms`) is had where the kernel
has `netem`; `why_no_delay` says whether.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from types import TracebackType
from typing import NamedTuple

from cairn.core.errors import HardwareError

CLONE_NEWNET = 0x40000000
NETWORK = "10.77.0"
NETEM = "netem limit 100000 delay"  # packets that are under way at most, and for how long
TOOLS = ("ip", "tc", "nsenter", "unshare")
HOLD = (
    "import ctypes, signal, sys;"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL);"  # PR_SET_PDEATHSIG: it dies with its parent
    "sys.stdout.write('.'); sys.stdout.flush(); signal.pause()"
)


class LinkShape(NamedTuple):
    mbit: float = 1000.0  # of each host's link, in each direction
    burst: str = "128kb"
    queue: str = "20ms"  # longest wait in the queue of a link
    mtu: int = 9000  # headers are 0.7% of the bytes then, as in a cluster; 1500: 4.4%
    delay_ms: float = 0.0  # that a packet takes longer, in each direction


class Rig:
    """`with Rig(4, Shape(mbit=1000)) as rig: ... rig.enter(host)` in a process of its own."""

    def __init__(self, hosts: int, shape: LinkShape | list[LinkShape] = LinkShape()) -> None:  # noqa: B008
        self.shapes = shape if isinstance(shape, list) else [shape] * hosts
        self._holders: list[subprocess.Popen[bytes]] = []
        self.hosts = hosts

    def __enter__(self) -> "Rig":
        reason = why_not()
        if reason is not None:
            raise HardwareError(f"no network namespaces: {reason}")
        if any(shape.delay_ms for shape in self.shapes) and (reason := why_no_delay()):
            raise HardwareError(f"no latency between namespaces: {reason}", hint="delay_ms=0")
        try:
            self._holders = [_hold() for _ in range(self.hosts + 1)]  # the last is the switch
            self._build()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for holder in self._holders:
            _end(holder)
        self._holders = []

    def address(self, host: int) -> str:
        return f"{NETWORK}.{host + 1}"

    def enter(self, host: int) -> None:
        """Moves the calling process to that host; everything it opens from now on is there."""
        fd = os.open(f"/proc/{self._holders[host].pid}/ns/net", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            if libc.setns(fd, CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "setns")
        finally:
            os.close(fd)

    def _build(self) -> None:
        switch = self._holders[-1].pid
        _run(switch, "ip link add br0 type bridge")
        _run(switch, "ip link set br0 up")
        for host, shape in enumerate(self.shapes):
            pid = self._holders[host].pid
            _run(None, f"ip link add eth0 netns {pid} type veth peer name p{host} netns {switch}")
            _run(pid, f"ip link set eth0 mtu {shape.mtu} up")
            _run(pid, f"ip addr add {self.address(host)}/24 dev eth0")
            _run(pid, "ip link set lo up")
            _run(switch, f"ip link set p{host} mtu {shape.mtu} master br0 up")
            limit = f"root tbf rate {shape.mbit}mbit burst {shape.burst} latency {shape.queue}"
            for place, device in ((pid, "eth0"), (switch, f"p{host}")):
                _run(place, f"tc qdisc add dev {device} {limit}")
            if shape.delay_ms:  # on the way out: once in each direction between two hosts
                _run(pid, f"tc qdisc replace dev eth0 root handle 1: {NETEM} {shape.delay_ms}ms")
                _run(pid, f"tc qdisc add dev eth0 parent 1: {limit.removeprefix('root ')}")


def why_no_delay() -> str | None:
    """Why packets cannot be delayed here, or None if they can. Requires that `why_not` returned None."""
    holder = _hold()
    try:
        _run(holder.pid, "ip link add a0 type veth peer name a1")
        _run(holder.pid, f"tc qdisc add dev a0 root {NETEM} 1ms")
    except HardwareError as error:
        return f"this kernel has no netem ({error.message})"
    finally:
        _end(holder)
    return None


def why_not() -> str | None:
    """Why this process cannot create network namespaces, or None if it can."""
    if not sys.platform.startswith("linux"):
        return f"they are of Linux, this is {sys.platform}"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"no program {', '.join(missing)} (packages iproute2 and util-linux)"
    try:
        holder = _hold()
    except OSError as error:
        return f"may not make one ({error})"
    try:
        _run(holder.pid, "ip link add a0 type veth peer name a1")
        _run(holder.pid, "tc qdisc add dev a0 root tbf rate 1mbit burst 10kb latency 20ms")
    except HardwareError as error:
        return error.message
    finally:
        _end(holder)
    return None


def _hold() -> subprocess.Popen[bytes]:
    """A process in a namespace of its own, which waits to be killed."""
    command = ["unshare", "--net", sys.executable, "-S", "-c", HOLD]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert holder.stdout is not None
    assert holder.stderr is not None
    if holder.stdout.read(1) != b".":
        reason = holder.stderr.read().decode().strip() or "unshare failed"
        _end(holder)
        raise OSError(reason)
    return holder


def _end(holder: subprocess.Popen[bytes]) -> None:
    holder.kill()
    holder.communicate()


def _run(pid: int | None, command: str) -> None:
    """Run a command in the network namespace of a process, or in the own one."""
    inside = [] if pid is None else ["nsenter", "-t", str(pid), "-n"]
    done = subprocess.run([*inside, *command.split()], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HardwareError(f"`{command}`: {done.stderr.strip() or done.returncode}")
