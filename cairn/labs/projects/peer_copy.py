"""From one device to another: straight, or through a relay in the middle?

    straight   A ─────────────> B         one way
    staged     A ──> host ────> B         two, one after the other: the sum of both

On a GPU machine the two are copies between GPUs (or within the one there is) against a copy down to pinned host memory
and up again: the ceilings predict both. On a CPU three ranks play it: A sends to B through our shared-memory link, then
A sends to a third that passes it on; storing before forwarding doubles the time.
"""

import time
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

SIZES = (1 << 20, 4 << 20, 16 << 20)
GPU_SIZES = (16 << 20, 64 << 20, 256 << 20)


class Copies(NamedTuple):
    straight: list[float]  # seconds by size
    staged: list[float]
    wrong: int  # numbers that this rank had to have and does not


def run(bench: Workbench) -> Outcome:
    if bench.on_gpu:
        sizes = bench.pick(GPU_SIZES, GPU_SIZES[:2])
        bench.step("between devices, straight and through the host")
        straight, staged, wrong = gpu_times(sizes, bench.pick(9, 5))
    else:
        sizes = bench.pick(SIZES, SIZES[:2])
        bench.step("three ranks: straight, and through the third")
        ranks = run_ranks(3, relay_times, sizes, bench.pick(9, 4), backend="cairn", timeout_s=60)
        (straight, staged, _), wrong = ranks[0], ranks[1].wrong
    expected = predicted_ratio(bench)
    ratios = [b / a for a, b in zip(straight, staged, strict=True)]
    return Outcome(
        checks=_checks(expected, ratios, wrong),
        plots=[
            Plot(
                title=Words("Rate of a copy", "拷贝速率"),
                x=Words("MiB", "MiB"),
                y=Words("GB/s", "GB/s"),
                lines={
                    name: [(n / 2**20, n / s / 1e9) for n, s in zip(sizes, times, strict=True)]
                    for name, times in (("straight", straight), ("staged", staged))
                },
                log_x=True,
                log_y=True,
            )
        ],
        table=Table(
            columns=[
                Words("MiB", "MiB"),
                Words("straight, ms", "直传毫秒"),
                Words("staged, ms", "中转毫秒"),
                Words("staged over straight", "中转/直传"),
            ],
            rows=[
                [n / 2**20, a * 1e3, b * 1e3, b / a]
                for n, a, b in zip(sizes, straight, staged, strict=True)
            ],
        ),
    )


def _checks(expected: float, ratios: list[float], wrong: int) -> list[Check]:
    return [
        Check(
            what=Words("staged over straight, largest copy", "中转与直传耗时比（最大拷贝）"),
            predicted=expected,
            measured=ratios[-1],
            unit="x",
            within=0.4,  # 1 would mean that the stop in the middle is free
        ),
        Check(
            what=Words("staged over straight, every size", "中转与直传耗时比（所有尺寸）"),
            predicted=1.0,
            measured=min(ratios),
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("numbers that arrived wrong, both ways", "两种路径上传错的数值个数"),
            predicted=0,
            measured=wrong,
            unit="numbers",
        ),
    ]


def predicted_ratio(bench: Workbench) -> float:
    """Two ways instead of one on a CPU; on a GPU what the ceilings of bus and memory say."""
    limits = bench.ceilings
    down, up, copy = limits.device_to_host_pinned, limits.host_to_device_pinned, limits.copy
    if not bench.on_gpu or down is None or up is None or copy is None:
        return 2.0
    import torch

    staged = 1 / down.value + 1 / up.value
    if torch.cuda.device_count() > 1:
        return staged * down.value  # between GPUs at the rate of one way over the bus, at least
    return staged / (2 / copy.value)  # within one GPU a byte is read and written


def relay_times(rank: int, count: int, sizes: tuple[int, ...], repeats: int) -> Copies:
    """Rank 0 to rank 1; and to rank 2, which stores and forwards. Seconds, as rank 0 sees the answer."""
    import torch
    import torch.distributed as dist

    medians: tuple[list[float], list[float]] = ([], [])
    wrong = 0
    for size in sizes:
        pattern, acknowledgement = torch.arange(size // 4, dtype=torch.float32), torch.zeros(1)
        for way, route in enumerate(((0, 1), (0, 2, 1))):
            data = pattern.clone() if rank == 0 else torch.zeros_like(pattern)
            samples = []
            for _ in range(repeats + 1):
                dist.barrier()
                began = time.perf_counter()
                for source, target in pairwise(route):
                    if rank == source:
                        dist.send(data, target)
                    elif rank == target:
                        dist.recv(data, source)
                if rank == 1:
                    dist.send(acknowledgement, 0)
                elif rank == 0:
                    dist.recv(acknowledgement, 1)
                samples.append(time.perf_counter() - began)
            medians[way].append(median(samples[1:]))
            wrong += int((data != pattern).sum())
    return Copies(*medians, wrong)


def gpu_times(sizes: tuple[int, ...], repeats: int) -> Copies:
    import torch

    here, there = "cuda:0", f"cuda:{1 if torch.cuda.device_count() > 1 else 0}"
    straight, staged, wrong = [], [], 0
    for size in sizes:
        source = torch.ones(size, dtype=torch.uint8, device=here)
        target = torch.zeros(size, dtype=torch.uint8, device=there)
        middle = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        straight.append(_gpu_s(lambda a=source, b=target: b.copy_(a), repeats))
        wrong += int((target != 1).sum())
        target.zero_()
        staged.append(_gpu_s(lambda a=source, m=middle, b=target: _through(a, m, b), repeats))
        wrong += int((target != 1).sum())
    return Copies(straight, staged, wrong)


def _through(source: Any, middle: Any, target: Any) -> None:
    middle.copy_(source, non_blocking=True)
    if source.device != target.device:
        import torch

        torch.cuda.synchronize(source.device)
    target.copy_(middle, non_blocking=True)


def _gpu_s(call: Any, repeats: int) -> float:
    samples = []
    for _ in range(repeats + 2):
        _wait_for_all()
        began = time.perf_counter()
        call()
        _wait_for_all()
        samples.append(time.perf_counter() - began)
    return median(samples[2:])


def _wait_for_all() -> None:
    import torch

    for number in range(torch.cuda.device_count()):
        torch.cuda.synchronize(number)


LAB = described(__file__, run)
