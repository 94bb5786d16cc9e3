"""Why does torch not give memory back, and when does "reserved" run away from "allocated"?

    a step that repeats      the first one fills the cache, later ones ask the driver for nothing
    a buffer that grows      each new size fits into no hole that the last ones left: reserved grows, allocated does not

The policy is played by a model of the allocator; on a GPU the same requests go to the real one, and every number must
agree. On a CPU memory is not cached: each fresh buffer costs one page fault per page, a kept buffer none.
"""

import random
import resource

from cairn.labs.lab import Check, Outcome, Plot, Words, described
from cairn.labs.pytorch._caching import CachingAllocator, round_up
from cairn.labs.workbench import Workbench

MIB = 1 << 20


def run(bench: Workbench) -> Outcome:
    bench.step("a step that repeats")
    sizes = _sizes_of_step(bench.pick(60, 20))
    steady, before = CachingAllocator(), 0
    for _ in range(5):
        before = steady.segments
        _play_step(steady, sizes)
    bench.step("a buffer that grows")
    growing, curve = CachingAllocator(), []
    block = growing.allocate(MIB)
    for grown in range(
        12, bench.pick(200, 60), 4
    ):  # as a cache that is joined anew with each token
        fresh = growing.allocate(grown * MIB)
        growing.free(block)
        block = fresh
        curve.append((float(grown), growing.reserved / MIB, growing.peak_allocated / MIB))
    checks = [
        Check(
            what=Words(
                "requests to the driver in the fifth of five equal steps",
                "五个相同步中第五步向驱动申请的次数",
            ),
            predicted=0.0,
            measured=float(steady.segments - before),
            unit="",
        ),
        Check(
            what=Words(
                "reserved over peak in use, for a growing buffer",
                "不断变大的缓冲区：reserved 与峰值占用之比",
            ),
            predicted=1.5,
            measured=growing.reserved / growing.peak_allocated,
            unit="x",
            kind="at_least",
        ),
        *(_real_allocator(bench, sizes) if bench.on_gpu else []),
        *_page_faults(bench),
    ]
    return Outcome(
        checks=checks,
        plots=[_plot(curve)],
    )


def _plot(curve: list[tuple[float, float, float]]) -> Plot:
    return Plot(
        title=Words("A buffer that grows by 4 MiB at a time", "每次增长 4 MiB 的缓冲区"),
        x=Words("MiB in use", "占用 MiB"),
        y=Words("MiB", "MiB"),
        lines={
            "reserved": [(x, reserved) for x, reserved, _ in curve],
            "peak in use": [(x, peak) for x, _, peak in curve],
        },
    )


def _sizes_of_step(count: int) -> list[int]:
    """Of one training step: small and large, the same every time."""
    generator = random.Random(0)
    return [
        generator.choice((700, 5_000, 300_000, 3 * MIB + 1, 12 * MIB + 7)) for _ in range(count)
    ]


def _play_step(allocator: CachingAllocator, sizes: list[int]) -> None:
    """Forward allocates, backward frees in reverse."""
    blocks = [allocator.allocate(size) for size in sizes]
    for block in reversed(blocks):
        allocator.free(block)


def _real_allocator(bench: Workbench, sizes: list[int]) -> list[Check]:
    """Bytes in use, and how often the driver was asked in a repeated step, by torch's own statistics."""
    import torch

    bench.step("the real allocator")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(bench.device)
    allocated = []
    in_use = 0
    for _ in range(5):
        tensors = [torch.empty(size, dtype=torch.uint8, device=bench.device) for size in sizes]
        in_use = torch.cuda.memory_allocated(bench.device) - before
        allocated.append(torch.cuda.memory_stats(bench.device)["segment.all.allocated"])
        del tensors
    return [
        Check(
            what=Words("bytes in use: sizes rounded to 512", "占用字节：按 512 取整"),
            # Large blocks are not split when a mebibyte or less is left over: they keep it.
            predicted=float(sum(round_up(size, 512) for size in sizes)),
            measured=float(in_use),
            unit="B",
            within=0.1,
        ),
        Check(
            what=Words("segments asked for by the last of five steps", "五步中最后一步申请的段数"),
            predicted=0.0,
            measured=float(allocated[-1] - allocated[-2]),
            unit="",
        ),
    ]


def _page_faults(bench: Workbench) -> list[Check]:
    """Of a fresh buffer that is written once, and of the same buffer written again."""
    import torch

    bench.step("page faults of fresh and kept buffers")
    size = bench.size("mib") * MIB
    start = _faults()
    buffer = torch.empty(size, dtype=torch.uint8).fill_(1)
    fresh = _faults() - start
    start = _faults()
    buffer.fill_(2)
    again = _faults() - start
    pages = size / resource.getpagesize()
    return [
        Check(
            what=Words(
                "page faults of a fresh CPU buffer, at most one per page",
                "新 CPU 缓冲区的缺页数，至多每页一次",
            ),
            # Huge pages make it fewer; nothing makes it more but what else this thread touches.
            predicted=pages,
            measured=float(fresh),
            unit="",
            kind="at_most",
            within=0.05,
        ),
        Check(
            what=Words(
                "page faults of the same buffer again, share of the pages",
                "同一缓冲区再写一次的缺页占比",
            ),
            predicted=0.02,
            measured=again / pages,
            unit="",
            kind="at_most",
        ),
    ]


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


LAB = described(__file__, run)
