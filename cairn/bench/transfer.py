"""Transfer rate of KV blocks and weights between processes, by transport and run length.

    memcpy       the same runs copied within this process: no transport of one machine can beat it by much
    moves        reads and writes of scattered runs, 256 B to 4 MiB, between two processes
    hand-overs   a real cache from layout to layout: what the planner makes of it, and how fast it goes
    streamed     a prefill whose layers travel while the next are computed, beside one that sends at the end
    death        how long until a killed peer is seen, and a frozen one

Two processes on one machine; over a network TCP has its bandwidth as another limit. Best of several, since whatever
else runs here only adds time.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec
import numpy as np

from cairn.bench.record import RecordOrigin
from cairn.bench.transfer_peer import REQUEST
from cairn.comm.transfer.byte_runs import ByteRuns
from cairn.comm.transfer.choose_transport import make_transport, unusable
from cairn.comm.transfer.copies import copy_runs
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.errors import TransferError
from cairn.comm.transfer.handover_messages import Offer
from cairn.comm.transfer.handshake import Side
from cairn.comm.transfer.kv import REGION, KVContents, KVLayout, plan_kv
from cairn.comm.transfer.page_receiver import PageReceiver
from cairn.comm.transfer.transport import PeerGone, PeerJoined, TransferDone, TransferFailed
from cairn.hw.evidence import NIXL_PACKAGES, PEER_MEMORY
from cairn.hw.probe import probe
from cairn.hw.transfer_path import TransferPaths, transfer_paths
from cairn.hw.versions import package_version

RUN_BYTES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
MOST_BYTES = 64 << 20  # of one sample
MOST_RUNS = 8192
PATIENCE_S = 60.0
MODEL = KVContents(model="qwen3-0.6b", layers=28, kv_heads=8, width=128)
TOKENS = 512
A_PAGE = ByteRuns(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 4096))


class TransferRow(msgspec.Struct, frozen=True, kw_only=True):
    transport: str  # memcpy: within one process
    way: str  # read, write or copy
    run_bytes: int
    runs: int
    best_s: float
    median_s: float
    gb_per_s: float  # at the best
    of_memcpy: float  # of the rate of the same runs copied within one process


class HandOver(msgspec.Struct, frozen=True, kw_only=True):
    transport: str
    what: str
    nbytes: int
    runs: int
    plan_s: float
    best_s: float
    gb_per_s: float


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    transport: str
    layers: int
    compute_s: float  # of all layers
    after_s: float  # from the end of the prefill to the last byte, all layers sent at the end
    exposed_s: float  # the same, layer by layer


class Death(msgspec.Struct, frozen=True, kw_only=True):
    transport: str
    killed_s: float  # from SIGKILL to its detection, worst of several
    frozen_s: float  # from SIGSTOP


class TransferReport(msgspec.Struct, frozen=True, kw_only=True):
    origin: RecordOrigin
    paths: TransferPaths
    skipped: dict[str, str]  # transport -> why
    moves: list[TransferRow]
    hand_overs: list[HandOver]
    streamed: list[Streamed]
    deaths: list[Death]


Task = tuple[str, Callable[[], Sequence[object]]]  # a label, and what to measure


def tasks(kinds: list[str], repeats: int) -> list[Task]:
    """Everything there is to measure, a piece at a time; memcpy first, the others are set beside it."""
    memcpy = Memcpy(repeats)
    tasks: list[Task] = [("memcpy", memcpy.measure)]
    for kind in kinds:
        tasks += [
            (f"{kind} moves", lambda kind=kind: measure_moves(kind, repeats, memcpy)),
            (f"{kind} hand-overs", lambda kind=kind: measure_hand_overs(kind, repeats)),
            (f"{kind} streamed", lambda kind=kind: [measure_streamed(kind)]),
            (f"{kind} death", lambda kind=kind: [measure_death(kind, repeats)]),
        ]
    return tasks


def usable(kinds: list[str]) -> tuple[list[str], dict[str, str]]:
    """The transports that work here, and the reasons why the others do not."""
    reasons = {kind: unusable(kind) for kind in kinds}
    return (
        [kind for kind in kinds if reasons[kind] is None],
        {kind: reason for kind, reason in reasons.items() if reason is not None},
    )


def paths_here() -> TransferPaths:
    nixl = next(filter(None, map(package_version, NIXL_PACKAGES)), None)
    return transfer_paths(probe(), nixl, PEER_MEMORY.exists())


class Memcpy:
    """Reference: copies of the same runs within this process."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.rates: dict[int, float] = {}

    def measure(self) -> list[TransferRow]:
        source, target = (np.ones(MOST_BYTES, np.uint8) for _ in range(2))
        rows = []
        for size in RUN_BYTES:
            runs = scattered(size)
            times = [
                timed(lambda: copy_runs(source, target, runs))  # noqa: B023
                for _ in range(4 * self.repeats)  # more: the others are measured against it
            ]
            self.rates[size] = runs.nbytes / min(times)
            rows.append(self.row("memcpy", "copy", size, runs, times))
        return rows

    def row(
        self, kind: str, way: str, size: int, runs: ByteRuns, times: list[float]
    ) -> TransferRow:
        rate = runs.nbytes / min(times)
        return TransferRow(
            transport=kind,
            way=way,
            run_bytes=size,
            runs=runs.copies,
            best_s=min(times),
            median_s=median(times),
            gb_per_s=rate / 1e9,
            of_memcpy=rate / self.rates[size],
        )


def scattered(size: int) -> ByteRuns:
    """Runs of one length, in an order that nothing can merge."""
    count = max(1, min(MOST_RUNS, MOST_BYTES // size))
    order = np.random.default_rng(0).permutation(count)
    return ByteRuns(order * size, np.arange(count) * size, np.full(count, size))


def measure_moves(kind: str, repeats: int, memcpy: Memcpy) -> list[TransferRow]:
    rows = []
    with peer("serve", kind, str(MOST_BYTES)) as process, reader(kind, MOST_BYTES) as end:
        owner = end.connect(line(process))
        for size in RUN_BYTES:
            runs = scattered(size)
            for way, move in (("read", end.read), ("write", end.write)):
                move_all(end, [move(owner, REGION, REGION, runs)])  # what is set up once
                times = [
                    timed(lambda: move_all(end, [move(owner, REGION, REGION, runs)]))  # noqa: B023
                    for _ in range(repeats)
                ]
                rows.append(memcpy.row(kind, way, size, runs, times))
    return rows


def layouts() -> dict[str, tuple[KVLayout, KVLayout]]:
    def layout(tp: int, page: int, heads_first: bool) -> KVLayout:
        pages = TOKENS // page
        return KVLayout(contents=MODEL, page_size=page, pages=pages, tp=tp, heads_first=heads_first)

    same = layout(1, 16, True)
    return {
        "same layout, pages of 16": (same, same),
        "pages of 16 to 64": (same, layout(1, 64, True)),
        "tp 1 to 2, heads first": (same, layout(2, 16, True)),
        "tp 1 to 2, tokens first": (layout(1, 16, False), layout(2, 16, False)),
        "heads first to tokens first": (same, layout(1, 16, False)),
    }


def measure_hand_overs(kind: str, repeats: int) -> list[HandOver]:
    """Rank 0 of the target reads its part."""
    rows = []
    largest = layouts()["same layout, pages of 16"][0].region_bytes(0)
    rng = np.random.default_rng(0)
    with peer("serve", kind, str(largest)) as process, reader(kind, largest) as end:
        owner = end.connect(line(process))
        for what, (source, target) in layouts().items():
            tables = [rng.permutation(side.pages).tolist() for side in (source, target)]
            began = time.perf_counter()
            plan = plan_kv(source, tables[0], target, tables[1], (0, TOKENS))
            plan_s = time.perf_counter() - began
            (leg,) = plan.to_rank(0)
            times = [
                timed(lambda: move_all(end, [end.read(owner, REGION, REGION, leg.runs)]))  # noqa: B023
                for _ in range(repeats + 1)
            ]
            rows.append(
                HandOver(
                    transport=kind,
                    what=what,
                    nbytes=leg.runs.nbytes,
                    runs=leg.runs.copies,
                    plan_s=plan_s,
                    best_s=min(times),
                    gb_per_s=leg.runs.nbytes / min(times) / 1e9,
                )
            )
    return rows


def measure_streamed(kind: str, layer_s: float = 0.02) -> Streamed:
    layout = layouts()["same layout, pages of 16"][0]
    after, exposed = (_exposed(kind, layout, streamed, layer_s) for streamed in ("no", "yes"))
    layers = layout.contents.layers
    return Streamed(
        transport=kind, layers=layers, compute_s=layers * layer_s, after_s=after, exposed_s=exposed
    )


def _exposed(kind: str, layout: KVLayout, streamed: str, layer_s: float) -> float:
    """Seconds from the end of the other side's prefill to the last byte here."""
    words = msgspec.json.encode(layout).decode()
    with peer("give", kind, words, streamed, str(layer_s)) as process:
        end = make_transport(kind, "bench-receiver")
        try:
            end.allocate(REGION, layout.region_bytes(0))[:] = 0
            receiver = PageReceiver(end, Side("bench-receiver", 0, layout))
            receiver.listen()
            offer = msgspec.json.decode(line(process), type=Offer)
            receiver.receive(offer, offer.table, time.monotonic())
            send_line(process, "go")
            outcome, deadline = [], time.monotonic() + PATIENCE_S
            while not outcome and time.monotonic() < deadline:
                outcome = receiver.step(time.monotonic(), wait_s=0.001)
            arrived = time.monotonic()
            if not outcome or outcome[0] != (REQUEST,):
                raise TransferError(f"the hand-over over {kind} failed: {outcome}")
            for _ in range(100):
                receiver.step(time.monotonic(), wait_s=0.001)  # the release goes out
            return max(0.0, arrived - float(line(process)))
        finally:
            end.close()


def measure_death(kind: str, repeats: int) -> Death:
    killed = max(_seen(kind, signal.SIGKILL) for _ in range(min(3, repeats)))
    return Death(transport=kind, killed_s=killed, frozen_s=_seen(kind, signal.SIGSTOP))


def _seen(kind: str, how: signal.Signals) -> float:
    with peer("serve", kind, "4096") as process, reader(kind, 4096) as end:
        end.connect(line(process))
        while not any(isinstance(event, PeerJoined) for event in end.events(0.1)):
            pass
        move_all(end, [end.read("bench-owner", REGION, REGION, A_PAGE)])  # both ends are awake
        os.kill(process.pid, how)
        began = time.perf_counter()
        while not any(isinstance(event, PeerGone) for event in end.events(0.01)):
            if time.perf_counter() - began > PATIENCE_S:
                raise TransferError(f"{kind}: {how.name} was not noticed within {PATIENCE_S:g} s")
        return time.perf_counter() - began


@contextmanager
def peer(*words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "cairn.bench.transfer_peer", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def reader(kind: str, nbytes: int) -> Iterator[TransferEndpoint]:
    end = make_transport(kind, "bench-reader")
    try:
        end.allocate(REGION, nbytes)[:] = 1
        end.listen()
        yield end
    finally:
        end.close()


def move_all(end: TransferEndpoint, tickets: list[int]) -> None:
    pending, deadline = set(tickets), time.monotonic() + PATIENCE_S
    while pending:
        for event in end.events(0.5):
            if isinstance(event, TransferDone):
                pending.discard(event.ticket)
            elif isinstance(event, TransferFailed | PeerGone):
                raise TransferError(f"a transfer failed: {event.reason}")
        if time.monotonic() > deadline:
            raise TransferError(f"a transfer has not ended within {PATIENCE_S:g} s")


def timed(act: Callable[[], None]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def line(process: subprocess.Popen[str]) -> str:
    text = process.stdout.readline().strip() if process.stdout is not None else ""
    if not text:
        raise TransferError("the other process of the measurement has died", hint="see its output")
    return text


def send_line(process: subprocess.Popen[str], text: str) -> None:
    if process.stdin is not None:
        process.stdin.write(text + "\n")
        process.stdin.flush()
