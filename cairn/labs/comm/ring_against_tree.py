"""When does a tree beat a ring? When waiting costs more than bytes: predict the size at which they cross.

    ring    2(n-1) waits       2(n-1)/n vectors        halving-doubling    2 log2(n) waits    the same bytes
    tree    about 2 log2(n) waits, in chunks behind each other, up to 2 vectors through the busiest rank

The closed form has the ring's time, and the waits say by how much a tree wins on small vectors. The link simulator runs
both schedules, operation by operation, and shows where they cross.
"""

import math
from typing import TYPE_CHECKING

from cairn.comm.cost import LinkCost, estimate
from cairn.comm.schedule.catalogue import make
from cairn.comm.schedule.verify import verify
from cairn.comm.simulate.schedule_run import run_schedule
from cairn.comm.simulate.topology import delay_us, topology
from cairn.labs.lab import Check, Lines, Outcome, Plot, Points, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.comm.simulate.topology import FabricTopology

RATE = 50.0  # GB/s of a link
CHUNK = 256 << 10  # a tree is cut into such pieces, which follow each other
MOST_CHUNKS = 32


def run(bench: Workbench) -> Outcome:
    ranks = bench.size("ranks")
    top = topology("rail-1tier", ranks, domain=1, nic_gb_per_s=RATE)
    sizes = [1 << power for power in range(12, 30, bench.pick(1, 3))]
    ring, trees = make("all_reduce", "ring", ranks), {}
    around, up_down = [], []
    for size in sizes:
        bench.step(f"ring and tree of {ranks} ranks, {size} bytes")
        pieces = _chunks(size)
        tree = trees.setdefault(pieces, make("all_reduce", "tree", ranks, chunks=pieces))
        around.append((float(size), run_schedule(ring, top, size).us))
        up_down.append((float(size), run_schedule(tree, top, size).us))
    waits = waits_of(ranks)
    traffic = {"ring": 2 * (ranks - 1) / ranks, "tree": verify(trees[_chunks(sizes[-1])]).traffic}
    return Outcome(
        checks=[
            *_waits(ranks, waits),
            *_ring_times(ranks, _link(top), around),
            *_ratios(waits, traffic, around, up_down),
        ],
        plots=[
            Plot(
                title=Words(f"All-reduce of {ranks} ranks", f"{ranks} 个 rank 的 all-reduce"),
                x=Words("bytes", "字节"),
                y=Words("us", "微秒"),
                lines={"ring": around, "tree": up_down},
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(waits, traffic, {"ring": around, "tree": up_down}),
        notes=[_crossing(around, up_down)],
    )


def waits_of(ranks: int) -> dict[str, int]:
    """How often each algorithm waits for a message, one after another: counted in its schedule."""
    schedules = {
        "ring": make("all_reduce", "ring", ranks),
        "halving_doubling": make("all_reduce", "halving_doubling", ranks),
        "tree": make("all_reduce", "tree", ranks, chunks=1),
    }
    return {name: verify(schedule).steps for name, schedule in schedules.items()}


def _link(top: "FabricTopology") -> LinkCost:
    import numpy as np

    return LinkCost(alpha_us=float(delay_us(top, np.zeros(1), np.ones(1))[0]), gb_per_s=RATE)


def _waits(ranks: int, waits: dict[str, int]) -> list[Check]:
    return [
        Check(
            what=Words("waits of the ring", "ring 的串行等待次数"),
            predicted=2 * (ranks - 1),
            measured=waits["ring"],
            unit="steps",
        ),
        Check(
            what=Words("waits of halving-doubling", "halving-doubling 的等待次数"),
            predicted=2 * math.log2(ranks),
            measured=waits["halving_doubling"],
            unit="steps",
        ),
    ]


def _ring_times(ranks: int, link: LinkCost, around: Points) -> list[Check]:
    """The closed form beside the simulator, at both ends."""
    ends = (
        (around[0], Words("4 KiB", "4 KiB")),
        (around[-1], Words("the largest size", "最大尺寸")),
    )
    return [
        Check(
            what=Words(f"ring at {label.en}", f"ring，{label.zh}"),
            predicted=estimate("all_reduce", "ring", ranks, int(size), link, "one_by_one").us,
            measured=us,
            unit="us",
            within=0.1,
        )
        for (size, us), label in ends
    ]


def _ratios(
    waits: dict[str, int], traffic: dict[str, float], around: Points, up_down: Points
) -> list[Check]:
    return [
        Check(
            what=Words("ring over tree, 4 KiB", "4 KiB 时 ring 与 tree 的耗时比"),
            predicted=waits["ring"] / waits["tree"],
            measured=around[0][1] / up_down[0][1],
            unit="x",
            within=0.25,
        ),
        Check(
            what=Words("tree over ring, largest size", "最大尺寸时 tree 与 ring 的耗时比"),
            predicted=traffic["tree"] / traffic["ring"],
            measured=up_down[-1][1] / around[-1][1],
            unit="x",
            kind="at_least",
        ),
    ]


def _table(waits: dict[str, int], traffic: dict[str, float], times: Lines) -> Table:
    return Table(
        columns=[
            Words("schedule", "算法"),
            Words("waits", "等待次数"),
            Words("vectors through the busiest rank", "最忙 rank 的数据量（倍）"),
            Words("us at 4 KiB", "4 KiB 耗时 us"),
            Words("us at the largest", "最大尺寸耗时 us"),
        ],
        rows=[
            [name, waits[name], traffic[name], points[0][1], points[-1][1]]
            for name, points in times.items()
        ],
    )


def _chunks(size: int) -> int:
    return min(max(size // CHUNK, 1), MOST_CHUNKS)


def _crossing(ring: list[tuple[float, float]], tree: list[tuple[float, float]]) -> Words:
    size = next((s for (s, a), (_, b) in zip(ring, tree, strict=True) if a < b), None)
    if size is None:
        return Words("the tree wins at every size here", "在这些尺寸上 tree 始终更快")
    size_text = f"{size / 1024:.0f} KiB"
    return Words(f"the ring is faster from {size_text} on", f"从 {size_text} 起 ring 更快")


LAB = described(__file__, run)
