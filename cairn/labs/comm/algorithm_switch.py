"""At which size does a library change its algorithm, and can that be predicted? From a sweep with holes in it.

    small    latency decides     LL, tree        large    bandwidth decides     ring, NVLS, Simple

NCCL's own cost model with three constants is fitted to every second size of published sweeps and must predict the sizes
it has not seen, and the size at which the algorithm changes. Then this project's own backend chooses, and is measured.
"""

import math
from statistics import median

from cairn.comm.cost import LinkCost
from cairn.comm.nccl_model import calibrate, choose, cluster_of
from cairn.comm.published import ALL_REDUCE, SWITCHES, PublishedSweep, Switch
from cairn.labs.comm._timed import slowest_us, times_us
from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.ranks import run_ranks
from cairn.labs.workbench import Workbench

RANKS = 4
TRIED = ("one_shot", "two_shot", "ring")


def forced(rank: int, count: int, sizes: tuple[int, ...], repeats: int) -> list[list[list[float]]]:
    """Microseconds by schedule, by size, of every repeat."""
    import torch
    import torch.distributed as dist

    from cairn.labs.torch_backend import Options

    groups = [dist.new_group(backend="cairn", pg_options=Options(schedule=name)) for name in TRIED]
    vectors = [torch.ones(size // 4) for size in sizes]
    return [
        [times_us(lambda g=g, v=v: dist.all_reduce(v, group=g), repeats) for v in vectors]
        for g in groups
    ]


def held_out(sweep: PublishedSweep) -> tuple[float, list[tuple[int, float, float, str]]]:
    """Median error of the sizes that the calibration has not seen, and all rows."""
    cluster = cluster_of(sweep.fabric, sweep.gpus, sweep.nodes, sweep.nic_gb_per_s)
    constants, _ = calibrate(cluster, sweep.points[::2])
    rows, errors = [], []
    for place, point in enumerate(sweep.points):
        guess = choose(cluster, "all_reduce", point.bytes, constants)
        rows.append((point.bytes, point.us, guess.us, f"{guess.algorithm}/{guess.protocol}"))
        if place % 2:
            errors.append(abs(guess.us / point.us - 1))
    return median(errors), rows


def run(bench: Workbench) -> Outcome:
    from cairn.labs.torch_backend.choice import Places, ranked

    name = "8 x H200"
    sweep = next(one for one in ALL_REDUCE if one.name == name)
    bench.step(f"{name}: fit on half of the sizes")
    error, rows = held_out(sweep)
    published = next(one for one in SWITCHES if one.sweep == name)
    predicted_bytes = next(size for size, _, _, what in rows if what.startswith(published.after))
    sizes = bench.pick((4 << 10, 64 << 10, 1 << 20, 4 << 20), (4 << 10, 1 << 20))
    bench.step(f"this project's backend on {RANKS} ranks: each schedule forced")
    times = run_ranks(RANKS, forced, sizes, bench.pick(15, 6), backend="gloo")
    best = [
        [min(slowest_us([rank[which][at] for rank in times])) for at in range(len(sizes))]
        for which in range(len(TRIED))
    ]
    regrets = []
    for at, size in enumerate(sizes):
        order = [
            row.name
            for row in ranked(
                "all_reduce", Places((0,) * RANKS), size, LinkCost(alpha_us=60, gb_per_s=1)
            )
        ]
        chosen = next(one for one in order if one in TRIED)
        regrets.append(best[TRIED.index(chosen)][at] / min(best[w][at] for w in range(len(TRIED))))
    return Outcome(
        checks=_checks(error, published, predicted_bytes, regrets),
        plots=[_plot(name, rows)],
        table=Table(
            columns=[
                Words("bytes", "字节"),
                Words("published us", "公布值 us"),
                Words("model us", "模型 us"),
                Words("model's choice", "模型的选择"),
            ],
            rows=[list(row) for row in rows],
        ),
        notes=[
            Words(
                f"{size >> 10} KiB on {RANKS} ranks here: "
                + ", ".join(f"{one} {best[w][at]:.0f} us" for w, one in enumerate(TRIED)),
                f"本机 {RANKS} 个 rank，{size >> 10} KiB："
                + "，".join(f"{one} {best[w][at]:.0f} us" for w, one in enumerate(TRIED)),
            )
            for at, size in enumerate(sizes)
        ],
    )


def _checks(
    error: float, published: Switch, predicted_bytes: int, regrets: list[float]
) -> list[Check]:
    return [
        Check(
            what=Words("median error of sizes not seen", "未见过尺寸的误差中位数"),
            predicted=0.12,
            measured=error,
            unit="share",
            kind="at_most",
        ),
        Check(
            # Sizes double from row to row: the next one is as near as can be asked for.
            what=Words(
                f"where {published.before} becomes {published.after}: off the published {published.bytes >> 20} MiB by",
                f"{published.before} 切换到 {published.after} 的尺寸：与公布的 {published.bytes >> 20} MiB 相差",
            ),
            predicted=1,
            measured=abs(math.log2(predicted_bytes / published.bytes)),
            unit="doublings",
            kind="at_most",
        ),
        Check(
            what=Words("our choice over the best one, median", "本后端所选与最优之比（中位数）"),
            predicted=1.0,
            measured=median(regrets),
            unit="x",
            kind="at_most",
            within=0.4,
        ),
    ]


def _plot(name: str, rows: list[tuple[int, float, float, str]]) -> Plot:
    return Plot(
        title=Words(f"All-reduce on {name}", f"{name} 上的 all-reduce"),
        x=Words("bytes", "字节"),
        y=Words("us", "微秒"),
        lines={
            "published": [(float(size), us) for size, us, _, _ in rows],
            "model": [(float(size), us) for size, _, us, _ in rows],
        },
        log_x=True,
        log_y=True,
    )


LAB = described(__file__, run)
