"""Why is reading a prompt so much cheaper per token than writing an answer?

Prefill multiplies each weight with every token of the prompt, decode with one token per sequence. The same model, two
sides of the roofline: `step_cost` says how many FLOPs and bytes each has, the machine's ceilings how long they take.
"""

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import (
    SMALL,
    Rates,
    ask,
    drain,
    host_rates,
    small_engine,
    words,
)
from cairn.labs.workbench import Workbench
from cairn.models.step_cost import SequenceWork, step_cost

PROMPTS = (8, 32, 128)  # and the longest


def floor_s(tokens: int, cached: int, rates: Rates) -> tuple[float, float]:
    """Seconds that arithmetic and memory take at least, of one step over one sequence."""
    cost = step_cost(SMALL, [SequenceWork(tokens, cached)], 4)
    return cost.flops / rates.flops_per_s, cost.bytes / rates.bytes_per_s


@one_thread()
def run(bench: Workbench) -> Outcome:
    rates = host_rates(bench)
    bench.step("starting a small engine")
    engine = small_engine(SMALL, enable_prefix_caching=False)
    drain(engine, [ask(0, words(16, SMALL.vocab, 0), 4)])  # buffers, threads
    lengths, outputs = (*bench.pick(PROMPTS, (8,)), bench.size("prompt")), bench.pick(16, 6)
    rows, prefill, decode = [], [], []
    for number, length in enumerate(lengths, 1):
        bench.step(f"a prompt of {length} tokens, {outputs} tokens out")
        firsts, others = [], []
        for again in range(3):  # the quickest counts: whatever else the machine does only adds time
            engine.times.clear()
            drain(engine, [ask(10 * number + again, words(length, SMALL.vocab, again), outputs)])
            times = [step.total for step in engine.times]
            firsts.append(times[0])
            others += times[1:]
        whole, steady = min(firsts), sorted(others)[len(others) // 4]
        compute, memory = floor_s(length, 0, rates)
        prefill.append((float(length), whole / length * 1e6))
        decode.append((float(length), steady * 1e6))
        side = "arithmetic" if compute > memory else "memory"
        rows.append([length, whole * 1e3, max(compute, memory) * 1e3, side, steady * 1e3])
    long, (one_compute, one_memory) = lengths[-1], floor_s(1, lengths[-1], rates)
    promised = max(one_compute, one_memory) / (max(floor_s(long, 0, rates)) / long)
    return Outcome(
        checks=_checks(long, promised, decode, prefill),
        plots=[
            Plot(
                title=Words("Cost of one token", "单个 token 的代价"),
                x=Words("tokens of the prompt", "prompt 的 token 数"),
                y=Words("microseconds a token", "微秒 / token"),
                lines={"prefill": prefill, "decode": decode},
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(rows),
        notes=[
            Words(
                f"This CPU: {rates.flops_per_s / 1e9:.0f} GFLOP/s over {rates.bytes_per_s / 1e9:.0f} GB/s is a ridge "
                f"of {rates.flops_per_s / rates.bytes_per_s:.1f} FLOP/byte. An H200 has about 160 in bf16, so there "
                "the gap between the two phases is a hundred times wider.",
                f"本机 CPU：{rates.flops_per_s / 1e9:.0f} GFLOP/s 比 {rates.bytes_per_s / 1e9:.0f} GB/s，拐点约 "
                f"{rates.flops_per_s / rates.bytes_per_s:.1f} FLOP/字节；H200 的 bf16 约为 160，"
                "两个阶段的差距大两个数量级。",
            )
        ],
    )


def _checks(long: int, promised: float, decode: Points, prefill: Points) -> list[Check]:
    return [
        Check(
            what=Words(
                f"a decoded token costs at least so many times a token of a {long}-token prompt",
                f"生成一个 token 的代价至少是 {long} 长 prompt 中一个 token 的多少倍",
            ),
            predicted=promised,
            measured=decode[-1][1] / prefill[-1][1],
            unit="x",
            kind="at_least",
            within=0.4,
        ),
        Check(
            what=Words(
                "a token of the longest prompt against one of the shortest",
                "最长 prompt 与最短 prompt 中单个 token 的代价之比",
            ),
            predicted=0.75,
            measured=prefill[-1][1] / prefill[0][1],
            unit="x",
            kind="at_most",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("prompt tokens", "prompt token 数"),
            Words("prefill, ms", "prefill（毫秒）"),
            Words("floor, ms", "下限（毫秒）"),
            Words("bound by", "受限于"),
            Words("one decode step, ms", "单步 decode（毫秒）"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
