"""CPU time of routers per JSON request and per streamed event, under the same load.

clients --> router --> two servers without a model        CPU of the router's process alone, from the scheduler
"""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from cairn.core.errors import CairnError
from cairn.fleet.measure.mock_server import FRAMES
from cairn.fleet.measure.peers import Peer

SERVERS = 2
OWN = "cairn"  # the peer whose failure is an error
PATIENCE_S = 30.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    router: str
    installed: bool
    us_per_request: float | None = None
    us_per_frame: float | None = None
    requests_per_s: float | None = None
    rss_mb: float | None = None
    note: str = ""


def measure(peer: Peer, requests: int, streams: int) -> Cost:
    """Measure a router with fresh servers. A router that cannot be started has a note instead of figures."""
    if not peer.installed:
        return Cost(router=peer.name, installed=False, note=f"not installed: {peer.where}")
    try:
        return _measure_started(peer, requests, streams)
    except CairnError as error:
        if peer.name == OWN:
            raise
        return Cost(router=peer.name, installed=True, note=error.message.splitlines()[-1])


def _measure_started(peer: Peer, requests: int, streams: int) -> Cost:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = [free_port() for _ in range(SERVERS + 1)]
        upstream = [sys.executable, "-m", "cairn.fleet.measure.mock_server"]
        for port in ports[1:]:
            stack.enter_context(started([*upstream, str(port)], port))
        pid = stack.enter_context(started(peer.command(folder, ports[0], ports[1:]), ports[0]))
        return asyncio.run(_measure(peer, pid, ports[0], requests, streams))


async def _measure(peer: Peer, pid: int, port: int, requests: int, streams: int) -> Cost:
    whole, stream = _request(False), _request(True)
    await _until_answered(port, whole)
    await _json(port, whole, 64, 8)  # connections are open, code is warm
    before, began = cpu_s(pid), time.perf_counter()
    await _json(port, whole, requests, 32)
    took, each = time.perf_counter() - began, (cpu_s(pid) - before) / requests
    before = cpu_s(pid)
    await asyncio.gather(*(_sse(port, stream) for _ in range(streams)))
    frame = max(cpu_s(pid) - before - streams * each, 0.0) / (streams * FRAMES)
    return Cost(
        router=peer.name,
        installed=True,
        us_per_request=round(each * 1e6, 1),
        us_per_frame=round(frame * 1e6, 1),
        requests_per_s=round(requests / took, 1),
        rss_mb=round(rss_bytes(pid) / 1e6, 1),
    )


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, over all threads, in nanosecond resolution."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _request(stream: bool) -> bytes:
    words = " ".join(f"word{at}" for at in range(110))
    body = json.dumps({"model": "mock", "max_tokens": FRAMES, "stream": stream,
                       "messages": [{"role": "user", "content": words}]}).encode()  # fmt: skip
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


async def _json(port: int, request: bytes, count: int, connections: int) -> None:
    left = iter(range(count))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in left:
            writer.write(request)
            await _whole_answer(reader)
        writer.close()

    await asyncio.gather(*(client() for _ in range(connections)))


async def _whole_answer(reader: asyncio.StreamReader) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    if b" 200" not in head.split(b"\r\n", 1)[0]:
        raise CairnError(f"the router answered {head[:80]!r}")
    if b"content-length: " in head:
        await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    else:
        await reader.readuntil(b"0\r\n\r\n")


async def _sse(port: int, request: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    await reader.readuntil(b"[DONE]\n\n")
    writer.close()


async def _until_answered(port: int, request: bytes) -> None:
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            await _json(port, request, 1, 1)
            return
        except (OSError, CairnError, asyncio.IncompleteReadError):
            if time.monotonic() > ends:
                raise
            await asyncio.sleep(0.2)


@contextlib.contextmanager
def started(command: Sequence[str], port: int) -> Generator[int]:
    process = subprocess.Popen(
        list(command), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        _wait_for(port, process)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stderr is not None:
            process.stderr.close()


def _wait_for(port: int, process: "subprocess.Popen[bytes]") -> None:
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            said = process.stderr.read().decode(errors="replace")[-500:] if process.stderr else ""
            raise CairnError(f"{process.args} ended with {process.returncode}: {said}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise CairnError(f"{process.args} does not listen on port {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
