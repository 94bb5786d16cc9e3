"""What does it cost to wait for the longest answer of a batch?

    static       ####........   a batch ends with its longest answer; rows of short ones stand empty
    continuous   ####++++++++   a row that falls free is given to the next request in the very next step

Steps are counted, not only timed: how many the engine takes is exactly predictable from the lengths.
"""

import heapq
import random

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import TINY, ask, drain, small_engine, words
from cairn.labs.workbench import Workbench

ROWS = 8


def static_steps(lengths: list[int], rows: int) -> int:
    """Batch after batch, each as long as its longest answer."""
    return sum(max(lengths[at : at + rows]) for at in range(0, len(lengths), rows))


def continuous_steps(lengths: list[int], rows: int) -> int:
    """The next request takes the row that falls free first; the last one to end says how many steps."""
    free = [0] * rows
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


@one_thread()
def run(bench: Workbench) -> Outcome:
    draw = random.Random(7)
    count = bench.setting("requests", bench.pick(48, 24))
    # Long tail, as answers have: most short, some ten times as long.
    lengths = [min(96, 2 + int(draw.expovariate(1 / 16))) for _ in range(count)]
    prompt = words(8, TINY.vocab, 1)
    engine = small_engine(TINY, max_num_seqs=ROWS, enable_prefix_caching=False)
    drain(engine, [ask(10_000, prompt, 4)])
    bench.step("static batches")
    before, seconds = engine.steps, 0.0
    for at in range(0, count, ROWS):
        seconds += drain(
            engine, [ask(at + i, prompt, n) for i, n in enumerate(lengths[at : at + ROWS])]
        )
    static, static_s = engine.steps - before, seconds
    bench.step("continuous batching")
    before = engine.steps
    continuous_s = drain(engine, [ask(i, prompt, n) for i, n in enumerate(lengths)])
    continuous = engine.steps - before
    foreseen = static_steps(lengths, ROWS), continuous_steps(lengths, ROWS)
    rows = [
        ["static", foreseen[0], static, sum(lengths) / static / ROWS, sum(lengths) / static_s],
        [
            "continuous",
            foreseen[1],
            continuous,
            sum(lengths) / continuous / ROWS,
            sum(lengths) / continuous_s,
        ],
    ]
    return Outcome(
        checks=_checks(foreseen, static, continuous, static_s, continuous_s),
        table=Table(
            columns=[
                Words("batching", "批处理方式"),
                Words("steps foreseen", "预测步数"),
                Words("steps taken", "实际步数"),
                Words("share of rows at work", "行利用率"),
                Words("tokens/s", "tokens/s"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"{count} answers of {min(lengths)} to {max(lengths)} tokens through {ROWS} rows.",
                f"{count} 个回答，长度 {min(lengths)} 到 {max(lengths)} token，共 {ROWS} 行。",
            )
        ],
    )


def _checks(
    foreseen: tuple[int, int], static: int, continuous: int, static_s: float, continuous_s: float
) -> list[Check]:
    return [
        Check(
            what=Words("steps of static batches", "静态批处理的步数"),
            predicted=foreseen[0],
            measured=static,
            unit="steps",
        ),
        Check(
            what=Words("steps with continuous batching", "连续批处理的步数"),
            predicted=foreseen[1],
            measured=continuous,
            unit="steps",
        ),
        Check(
            what=Words("gain in tokens per second", "吞吐提升倍数"),
            predicted=foreseen[0] / foreseen[1],
            measured=static_s / continuous_s,
            unit="x",
            within=0.35,
        ),
    ]


LAB = described(__file__, run)
