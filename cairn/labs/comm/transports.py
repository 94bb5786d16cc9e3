"""How fast do bytes get from one process to another? TCP, shared memory, NIXL: each has its own ceiling.

    tcp    user -> kernel -> user     two copies and the protocol         at most the loopback's throughput
    shm    the reader copies          one copy                            at most what one process copies
    nixl   UCX picks the way          shared memory here, RDMA elsewhere

A second process owns memory; this one reads scattered runs out of it. Short runs show what each run costs, long ones
what the bytes cost.
"""

from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.comm.transfer.byte_runs import ByteRuns
    from cairn.comm.transfer.endpoint import TransferEndpoint
    from cairn.hw.ceilings import Measured

RUNS = (256, 4 << 10, 64 << 10, 1 << 20)
MOST_BYTES = 16 << 20
QUICK_BYTES = 4 << 20
MOST_RUNS = 4096


class Read(NamedTuple):
    rates: list[float]  # GB/s, by length of run
    wrong: int  # bytes that did not arrive as they are


def scattered(size: int, total: int) -> "ByteRuns":
    """Runs of one length in an order that nothing can merge."""
    import numpy as np

    from cairn.comm.transfer.byte_runs import ByteRuns

    count = max(1, min(MOST_RUNS, total // size))
    order = np.random.default_rng(0).permutation(count)
    return ByteRuns(order * size, np.arange(count) * size, np.full(count, size))


def read_all(kind: str, sizes: tuple[int, ...], total: int, repeats: int) -> Read:
    """Scattered runs of each size, best of several; "memcpy": within this process."""
    import numpy as np

    from cairn.bench.transfer import line, move_all, peer, reader, timed
    from cairn.comm.transfer.copies import copy_runs
    from cairn.comm.transfer.kv import REGION

    rates, wrong = [], 0
    if kind == "memcpy":
        source, target = (np.ones(total, np.uint8) for _ in range(2))
        for runs in (scattered(size, total) for size in sizes):
            move = lambda runs=runs: copy_runs(source, target, runs)  # noqa: E731
            rates.append(runs.nbytes / min(timed(move) for _ in range(2 * repeats)) / 1e9)
        return Read(rates, wrong)
    with peer("serve", kind, str(total)) as process, reader(kind, total) as end:
        owner = end.connect(line(process))
        for runs in (scattered(size, total) for size in sizes):
            move = lambda runs=runs: move_all(end, [end.read(owner, REGION, REGION, runs)])  # noqa: E731
            move()
            wrong += wrong_bytes(end, runs)
            rates.append(runs.nbytes / min(timed(move) for _ in range(repeats)) / 1e9)
    return Read(rates, wrong)


def wrong_bytes(end: "TransferEndpoint", runs: "ByteRuns") -> int:
    """Bytes that are not the owner's, who counts from 0 to 255 again and again; the reader's are wrong afterwards."""
    import numpy as np

    from cairn.comm.transfer.kv import REGION

    memory = end.regions[REGION].memory
    assert memory is not None, "the reader's memory is the host's"
    received, expected = (
        memory[: runs.nbytes],
        np.arange(runs.nbytes, dtype=np.uint32).astype(np.uint8),
    )
    wrong = int((received != expected).sum())
    received[:] = 1
    return wrong


def run(bench: Workbench) -> Outcome:
    from cairn.comm.transfer.choose_transport import unusable

    kinds = ["memcpy", "tcp", "shm"] + (
        ["nixl"] if not bench.quick and unusable("nixl") is None else []
    )
    sizes = bench.pick(RUNS, (RUNS[0], RUNS[-1]))
    rates: dict[str, list[float]] = {}
    wrong, total = 0, bench.pick(MOST_BYTES, QUICK_BYTES)
    for kind in kinds:
        bench.step(f"{kind}: runs of {sizes[0]} B to {sizes[-1] >> 20} MiB")
        read = read_all(kind, sizes, total, bench.pick(6, 4))
        rates[kind], wrong = read.rates, wrong + read.wrong
    wire = bench.ceilings.loopback_throughput
    return Outcome(
        checks=_checks(rates, wrong),
        plots=[_plot(sizes, rates, wire)],
        table=Table(
            columns=[Words("run bytes", "段字节"), *[Words(kind, kind) for kind in kinds]],
            rows=[[size, *(rates[kind][i] for kind in kinds)] for i, size in enumerate(sizes)],
        ),
    )


def _checks(rates: dict[str, list[float]], wrong: int) -> list[Check]:
    return [
        Check(
            what=Words("shared memory over TCP, long runs", "长连续段：共享内存与 TCP 的速率比"),
            predicted=1.5,
            measured=rates["shm"][-1] / rates["tcp"][-1],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("TCP: long runs over runs of 256 B", "TCP：长连续段与 256 B 的速率比"),
            predicted=2.0,
            measured=rates["tcp"][-1] / rates["tcp"][0],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("shared memory, against one copy", "共享内存与进程内单次拷贝"),
            predicted=rates["memcpy"][-1],
            measured=rates["shm"][-1],
            unit="GB/s",
            kind="at_most",
            within=0.6,
        ),
        Check(
            what=Words("wrong bytes, all transports", "错误的字节数（所有方式）"),
            predicted=0,
            measured=wrong,
            unit="bytes",
        ),
    ]


def _plot(sizes: tuple[int, ...], rates: dict[str, list[float]], wire: "Measured | None") -> Plot:
    return Plot(
        title=Words("Reading another process's memory", "读取另一进程的内存"),
        x=Words("bytes of a run", "每段字节数"),
        y=Words("GB/s", "GB/s"),
        lines={
            kind: [(float(size), rate) for size, rate in zip(sizes, found, strict=True)]
            for kind, found in rates.items()
        },
        log_x=True,
        log_y=True,
        limit=("loopback", wire.value / 1e9) if wire is not None else None,
    )


LAB = described(__file__, run)
