"""Can a pipeline have no bubble? By cutting backward in two and putting the part that no stage waits for into the gaps.

    1f1b        idle per rank   (p-1) (F + I + W)
    zb-h1                       (p-1) (F + I - W)          the same activations as 1F1B
    zbv, dualpipev              (p-1) F of a stage         two chunks in a V; F of one beside B of the other can overlap

All four schedules are timed on paper, run by threads that sleep, and DualPipeV trains a tiny model on two real ranks.
"""

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._sleepers import idle_share
from cairn.labs.training._spread import Setting, alone, difference, on_ranks, tiny
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout, Strategy

STAGES, MICROBATCHES = 4, 12
NAMES = ("1f1b", "zb-h1", "zbv", "dualpipev")
# In forwards of a rank's whole share, with F = I = W = 1; a stage of a V is half of a rank's share.
IDLE = {"1f1b": 3.0, "zb-h1": 1.0, "zbv": 0.5, "dualpipev": 0.5}


@one_thread()
def run(bench: Workbench) -> Outcome:
    from cairn.train.parallel.pipeline.schedules import schedule
    from cairn.train.parallel.pipeline.simulate import Costs, simulate

    costs = Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    rows, checks = [], []
    for name in NAMES:
        bench.step(f"{name}: on paper")
        line = simulate(schedule(name, STAGES, MICROBATCHES), costs)
        predicted = (STAGES - 1) * IDLE[name]
        idle = sum(line.idle) / STAGES
        checks.append(
            Check(
                what=Words(
                    f"{name}: idle of a rank, in forwards",
                    f"{name}：每个 rank 的空闲（以前向为单位）",
                ),
                predicted=predicted,
                measured=round(idle, 9),
                unit="F",
                within=1e-6,
            )
        )
        rows.append([name, predicted, idle, line.bubble, max(line.stash)])
    unit = bench.pick(0.006, 0.003)
    shares = {}
    for name in ("1f1b", "dualpipev"):
        bench.step(f"{name}: threads that sleep")
        shares[name] = idle_share(schedule(name, STAGES, MICROBATCHES), costs, unit)
    checks.append(
        Check(
            what=Words(
                "idle of DualPipeV over 1F1B, really waiting",
                "真实等待中 DualPipeV 与 1F1B 的空闲比",
            ),
            predicted=0.4,  # 0.2 on paper; threads wake a little late
            measured=shares["dualpipev"] / shares["1f1b"],
            unit="x",
            kind="at_most",
        )
    )
    checks.append(_same_training(bench))
    return Outcome(
        checks=checks,
        table=_table(rows),
        notes=[_note()],
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("schedule", "调度"),
            Words("predicted idle, F", "预测空闲（F）"),
            Words("simulated idle, F", "模拟空闲（F）"),
            Words("bubble", "气泡比例"),
            Words("microbatches kept", "保存激活的 microbatch 数"),
        ],
        rows=rows,
    )


def _note() -> Words:
    return Words(
        "on a GPU the pairs of DualPipe overlap their all-to-alls with each other's compute, which this paper "
        "timeline does not count",
        "在 GPU 上 DualPipe 成对的前反向还能用彼此的计算掩盖 all-to-all，本时间线未计入这一收益",
    )


def _same_training(bench: Workbench) -> Check:
    setting = Setting(tiny(), Layout(pp=2), Strategy(order="dualpipev"), steps=1, per_step=4)
    bench.step("DualPipeV on two real ranks")
    apart = difference(run_ranks(2, on_ranks, setting), alone(setting))
    return Check(
        what=Words(
            "DualPipeV against one process, largest difference", "DualPipeV 与单进程的最大差异"
        ),
        predicted=1e-5,
        measured=apart,
        unit="",
        kind="at_most",
    )


LAB = described(__file__, run)
