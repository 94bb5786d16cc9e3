"""Where do 40 ms come from? A small message in two writes meets Nagle's algorithm and a delayed acknowledgement.

    A  write header ──>  B: not a whole message yet, acknowledges later (Linux: 40 ms)
    A  write body    x   held back: something small is still unacknowledged
       ············· 40 ms ·············· ACK ──> body ──> answer

TCP_NODELAY sends the body at once, and one write for both needs no switch at all. The same exchange is timed over TCP
in three ways, over a Unix socket and, for the price of the stack alone, compared with this machine's loopback ceiling.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Generator
from statistics import median
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.hw.ceilings import Measured

HEADER, BODY = b"h" * 16, b"b" * 48
DELAYED_ACK_S = 0.040  # Linux: TCP_DELACK_MIN
PATIENCE_S = 5.0
WARM_UP = 25  # a new connection acknowledges at once for a while


def run(bench: Workbench) -> Outcome:
    rounds = bench.setting("rounds", bench.pick(20, 6))
    medians = {}
    for name, family, no_delay, parts in (
        ("TCP, two writes, Nagle", socket.AF_INET, False, 2),
        ("TCP, two writes, TCP_NODELAY", socket.AF_INET, True, 2),
        ("TCP, one write, Nagle", socket.AF_INET, False, 1),
        ("Unix socket, two writes", socket.AF_UNIX, False, 2),
    ):
        bench.step(name)
        with connected(family, no_delay) as (here, there):
            medians[name] = median(exchange(here, there, rounds, parts))
    stalled, quick, whole, local = medians.values()
    trip = bench.ceilings.loopback_round_trip
    return Outcome(
        checks=[
            Check(
                what=Words("round trip with Nagle and two writes", "Nagle 加两次写的往返时间"),
                predicted=DELAYED_ACK_S * 1e3,
                measured=stalled * 1e3,
                unit="ms",
                within=0.25,
            ),
            Check(
                what=Words("round trip with TCP_NODELAY", "开启 TCP_NODELAY 的往返时间"),
                predicted=DELAYED_ACK_S / 10 * 1e3,
                measured=quick * 1e3,
                unit="ms",
                kind="at_most",
            ),
            Check(
                what=Words("one write needs no switch: round trip", "合并成一次写的往返时间"),
                predicted=DELAYED_ACK_S / 10 * 1e3,
                measured=whole * 1e3,
                unit="ms",
                kind="at_most",
            ),
        ],
        table=_table(medians, trip),
        notes=[
            Words(
                f"The stall costs {stalled / quick:,.0f} times the round trip; a Unix socket takes "
                f"{local / quick:.2f} of TCP's time.",
                f"停顿使往返时间变成 {stalled / quick:,.0f} 倍；Unix 套接字耗时为 TCP 的 {local / quick:.2f}。",
            )
        ],
    )


def _table(medians: dict[str, float], trip: "Measured | None") -> Table:
    return Table(
        columns=[Words("how", "方式"), Words("us per round trip", "往返微秒")],
        rows=[
            *([name, seconds * 1e6] for name, seconds in medians.items()),
            ["ceiling: two processes, 64 bytes", trip.value * 1e6 if trip else "–"],
        ],
    )


@contextlib.contextmanager
def connected(family: int, no_delay: bool) -> Generator[tuple[socket.socket, socket.socket]]:
    """Two ends on this machine; each gives up after a few seconds."""
    if family == socket.AF_UNIX:
        ends = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(PATIENCE_S)
            near = socket.create_connection(server.getsockname(), timeout=PATIENCE_S)
            ends = (near, server.accept()[0])
        for end in ends:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, int(no_delay))
    with ends[0], ends[1]:
        for end in ends:
            end.settimeout(PATIENCE_S)
        yield ends


def exchange(here: socket.socket, there: socket.socket, rounds: int, parts: int) -> list[float]:
    """Seconds of each request and its answer; the other end is a thread, which only waits."""
    answering = threading.Thread(target=_answer, args=(there, rounds + WARM_UP), daemon=True)
    answering.start()
    seconds = []
    for _ in range(rounds + WARM_UP):
        began = time.perf_counter()
        if parts == 2:
            here.sendall(HEADER)
            here.sendall(BODY)
        else:
            here.sendall(HEADER + BODY)
        _take(here, 1)
        seconds.append(time.perf_counter() - began)
    answering.join(PATIENCE_S)
    return seconds[WARM_UP:]


def _answer(there: socket.socket, rounds: int) -> None:
    for _ in range(rounds):
        _take(there, len(HEADER) + len(BODY))
        there.sendall(b"!")


def _take(end: socket.socket, count: int) -> None:
    while count:
        piece = end.recv(count)
        if not piece:
            raise ConnectionError("the other end has gone")
        count -= len(piece)


LAB = described(__file__, run)
