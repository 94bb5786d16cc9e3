"""Can a planner choose the layout? Search all of them with the same cost code that the simulator and trainer use.

    dp x fsdp x pp x cp x tp x recompute x microbatch:  cannot | does not fit | slower, and by which part

The planner's times are held against published multi-GPU runs it was not fitted to, and its choice against what a person
would take by habit.
"""

import time
from statistics import median

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.workbench import Workbench


def run(bench: Workbench) -> Outcome:
    from cairn.models.presets import preset
    from cairn.plan.device import device
    from cairn.plan.published import compare
    from cairn.plan.train_cost import Choice, Job, step_time
    from cairn.plan.train_memory import rank_memory
    from cairn.plan.train_search import search
    from cairn.train.memory import OF_DEVICE
    from cairn.train.parallel.layout import Layout

    model, gpus = "qwen3-8b", bench.size("gpus")
    gpu, job = device("h200"), Job(spec=preset(model), sequence=4096, sequences=1024)
    bench.step(f"{model} on {gpus} H200: every layout")
    began = time.process_time()
    plan = search(job, gpus, gpu)
    seconds = time.process_time() - began
    best = plan.rows[0]
    bench.step("published runs beside predictions")
    errors = [abs(row.error) for row in compare()]
    habits = {
        "dp only": Layout(dp=gpus),
        "fsdp only": Layout(fsdp=gpus),
        "tp 8": Layout(tp=8, dp=gpus // 8),
        "pp 8": Layout(pp=8, fsdp=gpus // 8),
    }
    rows: list[list[str | float | int]] = [[best.choice.layout.words(), 1.0, best.mfu, "yes"]]
    slowest = 1.0
    for name, layout in habits.items():
        choice = Choice(layout=layout, microbatch=1, recompute="selective")
        fits = rank_memory(job, choice).total() <= OF_DEVICE * gpu.memory_bytes
        ratio = step_time(job, choice, gpu).total() / best.seconds
        rows.append([f"{name}: {layout.words()}", ratio, best.mfu / ratio, "yes" if fits else "no"])
        slowest = max(slowest, ratio)
    speed = [(float(place), row.tokens_per_s) for place, row in enumerate(plan.rows)]
    return Outcome(
        checks=_checks(seconds, errors, slowest),
        plots=[_plot(model, speed)],
        table=_table(rows),
        notes=[
            Words(
                f"{plan.tried} choices tried, {plan.fitting} fit; best: {best.choice.words()}",
                f"共尝试 {plan.tried} 种，{plan.fitting} 种放得下；最优：{best.choice.words()}",
            )
        ],
    )


def _checks(seconds: float, errors: list[float], slowest: float) -> list[Check]:
    return [
        Check(
            what=Words("CPU seconds of the search", "搜索的 CPU 秒数"),
            predicted=5.0,
            measured=seconds,
            unit="s",
            kind="at_most",
        ),
        Check(
            what=Words("median error against published runs", "与公开数据的误差中位数"),
            predicted=0.2,
            measured=median(errors),
            unit="share",
            kind="at_most",
        ),
        Check(
            what=Words("slowest habit over the best layout", "最差的习惯布局与最优之比"),
            predicted=1.1,
            measured=slowest,
            unit="x",
            kind="at_least",
        ),
    ]


def _plot(model: str, speed: Points) -> Plot:
    return Plot(
        title=Words("The best ten", "前十名"),
        x=Words("place", "名次"),
        y=Words("tokens/s", "tokens/s"),
        lines={model: speed},
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("layout", "布局"),
            Words("time over the best", "与最优耗时比"),
            Words("MFU", "MFU"),
            Words("fits", "放得下"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
