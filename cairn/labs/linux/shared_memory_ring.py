"""Two processes, one memory: how our backend moves tensors without the kernel copying a byte.

    sender    [wait room] copy in ──> place 0 | place 1 | place 2 ...   [post items]
    receiver                          copy out <── [wait items]         [post room]

Two semaphores say full and free. With a single place the two take turns; with several, one writes while the other
reads. The same tensor goes through rings of 1 to 8 places and, with the ranks told to be on two hosts, over TCP.
"""

import os
import time
from statistics import median

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

PIECE = 256 << 10
PLACES = (1, 2, 4, 8)


def run(bench: Workbench) -> Outcome:
    size, repeats = bench.size("mib") << 20, bench.pick(9, 4)
    places = bench.pick(PLACES, (1, 8))
    ways = [*((count, False) for count in places), (places[-1], True)]
    bench.step("rings of several depths, then TCP")
    folder = str(bench.folder)
    found, wrong = zip(*run_ranks(2, move, folder, ways, size, repeats, timeout_s=60), strict=True)
    rates = [size / seconds / 1e9 for seconds in found[0]]
    ring, tcp = rates[:-1], rates[-1]
    copy = bench.ceilings.host_copy
    return Outcome(
        checks=_checks(wrong, ring, tcp),
        plots=[
            Plot(
                title=Words("Rate of one direction", "单向速率"),
                x=Words("places of the ring", "环的槽数"),
                y=Words("GB/s", "GB/s"),
                lines={
                    "shared memory": list(zip(places, ring, strict=True)),
                    "TCP": [(places[0], tcp), (places[-1], tcp)],
                },
                log_x=True,
                limit=("one copy", copy.value / 2e9) if copy else None,
            )
        ],
        table=Table(
            columns=[
                Words("way", "方式"),
                Words("GB/s", "GB/s"),
                Words("memory between, MiB", "中间内存 MiB"),
            ],
            rows=[
                *(
                    [f"ring of {count}", rate, count * PIECE / 2**20]
                    for count, rate in zip(places, ring, strict=True)
                ),
                ["TCP", tcp, "kernel's buffers"],
            ],
        ),
    )


def _checks(wrong: tuple[list[int], ...], ring: list[float], tcp: float) -> list[Check]:
    return [
        Check(
            what=Words("wrong bytes, all ways together", "所有方式的错误字节数"),
            predicted=0,
            measured=sum(map(sum, wrong)),
            unit="bytes",
        ),
        Check(
            what=Words("deepest ring over one place, by rate", "最深环与单槽环的速率比"),
            predicted=1.0,
            measured=ring[-1] / ring[0],
            unit="x",
            kind="at_least",
            within=0.15,
        ),
        Check(
            what=Words("deepest ring over TCP, by rate", "最深环与 TCP 的速率比"),
            predicted=1.0,
            measured=ring[-1] / tcp,
            unit="x",
            kind="at_least",
            within=0.1,
        ),
    ]


def move(
    rank: int, count: int, folder: str, ways: list[tuple[int, bool]], size: int, repeats: int
) -> tuple[list[float], list[int]]:
    """Seconds from rank 0 to rank 1 for each way, and how many bytes came wrong there."""
    import torch
    import torch.distributed as dist

    import cairn.labs.torch_backend  # noqa: F401  registers itself

    pattern = (torch.arange(size) % 251).to(torch.uint8)
    dist.destroy_process_group()
    seconds, wrong = [], []
    for number, (places, far) in enumerate(ways):
        os.environ["CAIRN_COMM_PIECE"], os.environ["CAIRN_COMM_PLACES"] = str(PIECE), str(places)
        if far:
            os.environ["CAIRN_COMM_HOST"] = f"host-{rank}"
        dist.init_process_group(
            "cairn", init_method=f"file://{folder}/{number}", rank=rank, world_size=count
        )
        buffer = torch.zeros_like(pattern) if rank else pattern
        seconds.append(median(_one_way_s(rank, buffer) for _ in range(repeats + 1)))
        wrong.append(int((buffer != pattern).sum()))
        dist.barrier()
        dist.destroy_process_group()
    return seconds, wrong


def _one_way_s(rank: int, tensor: object) -> float:
    """From the first byte until the other has said that it has the last."""
    import torch
    import torch.distributed as dist

    acknowledgement = torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)  # type: ignore[arg-type]
        dist.recv(acknowledgement, 1)
    else:
        dist.recv(tensor, 0)  # type: ignore[arg-type]
        dist.send(acknowledgement, 0)
    return time.perf_counter() - began


LAB = described(__file__, run)
