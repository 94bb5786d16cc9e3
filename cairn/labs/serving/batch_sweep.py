"""How far does throughput grow with the batch, and where does latency begin to pay for it?

    step time = max(bytes of the weights / bandwidth, FLOPs of the batch / rate)
                ^ the same for 1 row or 30                ^ grows with every row

Left of the ridge another row is free; right of it everybody's next token comes later.
"""

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import (
    SMALL,
    Rates,
    ask,
    better,
    host_rates,
    small_engine,
    words,
)
from cairn.labs.workbench import Workbench
from cairn.models.step_cost import SequenceWork, step_cost

BATCHES = (1, 2, 4, 8, 16, 32)  # and the largest
CONTEXT = 8


def floor_s(batch: int, rates: Rates) -> float:
    cost = step_cost(SMALL, [SequenceWork(1, CONTEXT)] * batch, 4)
    return max(cost.flops / rates.flops_per_s, cost.bytes / rates.bytes_per_s)


@one_thread()
def run(bench: Workbench) -> Outcome:
    batches = (*bench.pick(BATCHES, (1, 8)), bench.size("batch"))
    before = host_rates(bench, batches[-1])  # few rows reach less than a large product
    steps = bench.pick(10, 5)
    engine = small_engine(SMALL, max_num_seqs=64, enable_prefix_caching=False)
    rows, measured, limit, took = [], [], [], {}
    for batch in batches:
        bench.step(f"{batch} sequences decode")
        for number in range(batch):
            engine.add(ask(1000 * batch + number, words(CONTEXT, SMALL.vocab, number), steps + 3))
        engine.step()  # all prompts
        engine.step()
        engine.times.clear()
        engine.run()
        # The machine's rates are those of its best moment, and so is the step beside them.
        took[batch] = min(step.total for step in engine.times)
    rates = better(before, host_rates(bench, batches[-1]))
    for batch in batches:
        best = floor_s(batch, rates)
        measured.append((float(batch), batch / took[batch]))
        limit.append((float(batch), batch / best))
        rows.append([batch, took[batch] * 1e3, best * 1e3, batch / took[batch], best / took[batch]])
    last = batches[-1]
    ridge = rates.flops_per_s / rates.bytes_per_s  # FLOP a byte
    return Outcome(
        checks=_checks(last, rates, took),
        plots=[
            Plot(
                title=Words("Decode throughput by batch", "decode 吞吐随批大小的变化"),
                x=Words("sequences in a step", "一步中的序列数"),
                y=Words("tokens per second", "tokens/s"),
                lines={"roofline": limit, "measured": measured},
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(rows),
        notes=[
            Words(
                f"The ridge of this CPU is {ridge:.1f} FLOP/byte; a batch of b does b/2 FLOP per byte of float32 "
                f"weights, so the knee is at batch {2 * ridge:.0f}. On an H200 in bf16 it is near 160.",
                f"本机拐点 {ridge:.1f} FLOP/字节；批大小 b 时 float32 权重每字节做 b/2 FLOP，所以拐点在批 "
                f"{2 * ridge:.0f}；H200 bf16 约在 160。",
            )
        ],
    )


def _checks(last: int, rates: Rates, took: dict[int, float]) -> list[Check]:
    return [
        Check(
            what=Words(
                f"tokens per second at batch {last}, as the roofline says",
                f"批 {last} 的吞吐与屋顶线预测",
            ),
            predicted=last / floor_s(last, rates),
            measured=last / took[last],
            unit="tokens/s",
            within=0.6,
        ),
        Check(
            what=Words(f"throughput at batch {last} over batch 1", f"批 {last} 与批 1 的吞吐之比"),
            predicted=last * floor_s(1, rates) / floor_s(last, rates),
            measured=took[1] * last / took[last],
            unit="x",
            kind="at_least",
            within=0.5,
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("batch", "批大小"),
            Words("step, ms", "单步（毫秒）"),
            Words("floor, ms", "下限（毫秒）"),
            Words("tokens/s", "tokens/s"),
            Words("share of the limit", "达到上限的比例"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
