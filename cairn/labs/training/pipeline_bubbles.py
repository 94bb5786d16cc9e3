"""How much of a pipeline stands idle, and what makes it less? Formula, simulator, and threads that really wait.

    idle share of GPipe and 1F1B          (p-1) / (m + p-1)
    interleaved with v chunks             (p-1) / (v*m + p-1)
    activations kept by the first rank    GPipe: m      1F1B: at most p

The schedules are the lists of actions that the trainer runs. Here each action sleeps as long as it would compute.
"""

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
from cairn.labs.training._sleepers import idle_share
from cairn.labs.workbench import Workbench

STAGES = 4


def formula(name: str, stages: int, microbatches: int) -> float:
    chunks = 2 if name == "interleaved" else 1
    return (stages - 1) / (chunks * microbatches + stages - 1)


def run(bench: Workbench) -> Outcome:
    from cairn.train.parallel.pipeline.schedules import schedule
    from cairn.train.parallel.pipeline.simulate import Costs, simulate

    costs = Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    worst, rows = 0.0, []
    lines: dict[str, list[tuple[float, float]]] = {}
    stash: dict[tuple[str, int], float] = {}
    for name in ("gpipe", "1f1b", "interleaved"):
        for microbatches in (4, 8, 16, 32):
            bench.step(f"{name}, {microbatches} microbatches, on paper")
            line = simulate(schedule(name, STAGES, microbatches), costs)
            expected = formula(name, STAGES, microbatches)
            worst = max(worst, abs(line.bubble - expected))
            stash[name, microbatches] = max(line.stash)
            lines.setdefault(name, []).append((float(microbatches), line.bubble))
            rows.append([name, microbatches, expected, line.bubble, max(line.stash)])
    asleep = []
    unit = bench.pick(0.012, 0.008)
    for name, microbatches in (("1f1b", 4), ("interleaved", 4), ("1f1b", 8))[: bench.pick(3, 1)]:
        bench.step(f"{name}, {microbatches} microbatches, {STAGES} threads that sleep")
        share = idle_share(schedule(name, STAGES, microbatches), costs, unit)
        asleep.append((name, microbatches, share))
    return Outcome(
        checks=_checks(worst, stash, asleep),
        plots=[
            Plot(
                title=Words(f"Idle share of {STAGES} stages", f"{STAGES} 个 stage 的空闲比例"),
                x=Words("microbatches", "microbatch 数"),
                y=Words("share", "比例"),
                lines=lines,
                log_x=True,
            )
        ],
        table=Table(
            columns=[
                Words("schedule", "调度"),
                Words("microbatches", "microbatch 数"),
                Words("formula", "公式"),
                Words("simulated", "模拟"),
                Words("microbatches kept", "保存激活的 microbatch 数"),
            ],
            rows=rows,
        ),
    )


def _checks(
    worst: float, stash: dict[tuple[str, int], float], asleep: list[tuple[str, int, float]]
) -> list[Check]:
    return [
        Check(
            what=Words("formula against simulator, any case", "公式与模拟器的最大差异"),
            predicted=0.0,
            measured=round(worst, 9),
            unit="share",
        ),
        Check(
            what=Words(
                "activations kept, GPipe over 1F1B, 32 microbatches",
                "32 个 microbatch 时 GPipe 与 1F1B 的激活量之比",
            ),
            predicted=32 / STAGES,
            measured=stash["gpipe", 32] / stash["1f1b", 32],
            unit="x",
        ),
        *[
            Check(
                what=Words(
                    f"{name} x {microbatches}, really waiting",
                    f"{name} x {microbatches}，真实等待",
                ),
                predicted=formula(name, STAGES, microbatches),
                measured=share,
                unit="share",
                within=0.3,
            )
            for name, microbatches, share in asleep
        ],
    ]


LAB = described(__file__, run)
