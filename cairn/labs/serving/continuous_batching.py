"""What does it cost to wait for the longest answer of a batch?

    static       ####........   a batch ends with its longest answer; rows of short ones stand empty
    continuous   ####++++++++   a row that falls free is given to the next request in the very next step

Steps are counted, not only timed: how many the engine takes is exactly predictable from the lengths.
"""

import heapq
import random

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import TINY, ask, drain, small_engine, words
from cairn.labs.workbench import Workbench

ROWS = 8


def static_steps(lengths: list[int], rows: int) -> int:
    """Batch after batch, each as long as its longest answer."""
    return sum(max(lengths[at : at + rows]) for at in range(0, len(lengths), rows))


def continuous_steps(lengths: list[int], rows: int) -> int:
    """Whoever is next takes the row that falls free first; the last one to end says how many steps."""
    free = [0] * rows
    for length in lengths:
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


@one_thread()
def run(bench: Workbench) -> Outcome:
    draw = random.Random(7)
    count = bench.pick(48, 24)
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
        ["continuous", foreseen[1], continuous, sum(lengths) / continuous / ROWS,
         sum(lengths) / continuous_s],
    ]  # fmt: skip
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


LAB = Lab(
    name="continuous-batching",
    area="serving",
    title=Words("Continuous against static batching", "连续批处理与静态批处理"),
    hypothesis=Words(
        "A static batch takes as many steps as its longest answer; with continuous batching the steps are those of "
        "a greedy packing of all answers into the rows. Throughput gains by the ratio of the two.",
        "静态批的步数等于其中最长回答的长度；连续批处理的步数等于把所有回答贪心装入各行的结果。吞吐提升就是两者之比。",
    ),
    run=run,
    causes=(
        Words(
            "steps with fewer rows are a little cheaper, so time gains less than steps",
            "行数少的步略便宜，时间上的收益小于步数上的收益",
        ),
        Words(
            "another process took the CPU in one of the two runs",
            "其中一次运行时 CPU 被其他进程占用",
        ),
    ),
    code=(
        "cairn/serve/engine/scheduler.py:Scheduler",
        "cairn/serve/engine/waiting_queue.py:WaitingQueue",
        "cairn/serve/engine/loop.py:Engine",
    ),
    reading=("Orca: A Distributed Serving System for Transformer-Based Generative Models (2022)",),
    questions=(
        Question(
            Words(
                "Why can a language model be batched step by step when an image model cannot?",
                "为什么语言模型可以逐步重组批，而图像模型不行？",
            ),
            Words(
                "A request is many equal forward passes, so the batch may change between any two of them; all state "
                "of a request is its KV cache and its position.",
                "一个请求由许多次相同形式的前向组成，任意两次之间都可以换批成员；请求的全部状态只是 KV cache 和位置。",
            ),
        ),
        Question(
            Words(
                "When does continuous batching gain nothing?",
                "什么情况下连续批处理没有收益？",
            ),
            Words(
                "When all answers are equally long and arrive together: rows then fall free at the same time "
                "anyway. The gain comes from the spread of the lengths.",
                "所有回答一样长且同时到达时：各行本来就同时空出。收益来自长度的离散程度。",
            ),
        ),
        Question(
            Words(
                "What is a dynamic batching window, and why do decoders not need one?",
                "什么是动态批处理的等待窗口？为什么解码服务不需要它？",
            ),
            Words(
                "A server waits some milliseconds to collect requests before it runs a fixed batch. With "
                "iteration-level scheduling a newcomer joins the next step, so waiting only adds latency.",
                "服务器先等几毫秒凑齐一批再运行。迭代级调度中新请求下一步就能加入，等待只会增加延迟。",
            ),
        ),
    ),
    seconds=3.0,
)
