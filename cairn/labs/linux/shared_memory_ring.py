"""Two processes, one memory: how our backend moves tensors without the kernel copying a byte.

    sender    [wait room] copy in ──> place 0 | place 1 | place 2 ...   [post items]
    receiver                          copy out <── [wait items]         [post room]

Two semaphores say full and free. With a single place the two take turns; with several, one writes while the other
reads. The same tensor goes through rings of 1 to 8 places and, with the ranks told to be on two hosts, over TCP.
"""

import os
import time
from statistics import median

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

PIECE = 256 << 10
PLACES = (1, 2, 4, 8)


def run(bench: Workbench) -> Outcome:
    size, repeats = bench.pick(32 << 20, 8 << 20), bench.pick(9, 4)
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
                lines={"shared memory": list(zip(places, ring, strict=True)),
                       "TCP": [(places[0], tcp), (places[-1], tcp)]},
                log_x=True,
                limit=("one copy", copy.value / 2e9) if copy else None,
            )
        ],
        table=Table(
            columns=[Words("way", "方式"), Words("GB/s", "GB/s"), Words("memory between, MiB", "中间内存 MiB")],
            rows=[
                *([f"ring of {count}", rate, count * PIECE / 2**20] for count, rate in zip(places, ring, strict=True)),
                ["TCP", tcp, "kernel's buffers"],
            ],
        ),
    )  # fmt: skip


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

    import cairn.comm.backend  # noqa: F401  registers itself

    sent = (torch.arange(size) % 251).to(torch.uint8)
    dist.destroy_process_group()
    seconds, wrong = [], []
    for number, (places, far) in enumerate(ways):
        os.environ["CAIRN_COMM_PIECE"], os.environ["CAIRN_COMM_PLACES"] = str(PIECE), str(places)
        if far:
            os.environ["CAIRN_COMM_HOST"] = f"host-{rank}"
        dist.init_process_group(
            "cairn", init_method=f"file://{folder}/{number}", rank=rank, world_size=count
        )
        got = torch.zeros_like(sent) if rank else sent
        seconds.append(median(_one_way_s(rank, got) for _ in range(repeats + 1)))
        wrong.append(int((got != sent).sum()))
        dist.barrier()
        dist.destroy_process_group()
    return seconds, wrong


def _one_way_s(rank: int, tensor: object) -> float:
    """From the first byte until the other has said that it has the last."""
    import torch
    import torch.distributed as dist

    done = torch.zeros(1)
    dist.barrier()
    began = time.perf_counter()
    if rank == 0:
        dist.send(tensor, 1)  # type: ignore[arg-type]
        dist.recv(done, 1)
    else:
        dist.recv(tensor, 0)  # type: ignore[arg-type]
        dist.send(done, 0)
    return time.perf_counter() - began


LAB = Lab(
    name="shared-memory-ring",
    area="linux",
    title=Words("A ring in shared memory", "共享内存里的环"),
    hypothesis=Words(
        "A tensor through a ring in shared memory arrives whole, is not slower than over TCP, and a ring with "
        "several "
        "places is not slower than one with a single place, whatever the tensor's size: the memory between stays the "
        "same.",
        "张量经共享内存环传输完整无误，不慢于 TCP；多槽环不慢于单槽环；不论张量多大，中间占用的内存不变。",
    ),
    run=run,
    causes=(
        Words(
            "both ranks shared one core, so writing and reading could not overlap",
            "两个 rank 挤在一个核上，读写无法重叠",
        ),
        Words(
            "a deep ring leaves the cache: places that are read later come from memory",
            "环太深超出缓存：晚读的槽要从内存取",
        ),
    ),
    code=(
        "cairn/comm/backend/shared_link.py:SharedLink",
        "cairn/comm/backend/segment.py:Segment",
        "cairn/comm/backend/semaphore.py:Semaphore",
        "cairn/comm/backend/tcp_link.py:TcpLink",
    ),
    reading=(
        "The Art of Multiprocessor Programming (2008)",
        "memfd_create(2), Linux manual pages",
    ),
    questions=(
        Question(
            Words(
                "Why does a flag in shared memory not suffice to say that data is there?",
                "为什么共享内存里放一个标志位还不足以表示“数据已就绪”？",
            ),
            Words(
                "The processor may make the flag visible before the data (ARM does). A release store and an acquire "
                "load, or "
                "a semaphore, order the two.",
                "处理器可能让标志先于数据可见（ARM 就会）。需要 release 写加 acquire 读，或者信号量来保证顺序。",
            ),
        ),
        Question(
            Words(
                "Why several places, and why not a hundred?",
                "为什么要多个槽，又为什么不要一百个？",
            ),
            Words(
                "Two let writer and reader overlap, a few more absorb jitter. Beyond that the ring outgrows the "
                "cache, so "
                "each byte goes to memory and back.",
                "两个槽就能让读写重叠，再多几个吸收抖动；继续加深会超出缓存，每个字节都要往返内存。",
            ),
        ),
        Question(
            Words(
                "A process dies while it holds a place of the ring. What must the design provide?",
                "某进程持有环上的槽时死了，设计上要考虑什么？",
            ),
            Words(
                "Somebody must notice (a pidfd becomes readable, waits have limits) and the memory must not stay "
                "behind: an "
                "anonymous memfd vanishes with its last user.",
                "要有人能察觉（pidfd 变为可读、等待都有超时），内存也不能残留：匿名 memfd 随最后一个使用者消失。",
            ),
        ),
    ),
    needs=("linux", "2 processes"),
    seconds=4.0,
)
