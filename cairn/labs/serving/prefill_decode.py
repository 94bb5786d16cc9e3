"""Why is reading a prompt so much cheaper per token than writing an answer?

Prefill multiplies each weight with every token of the prompt, decode with one token per sequence. The same model, two
sides of the roofline: `step_cost` says how many FLOPs and bytes each has, the machine's ceilings how long they take.
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
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
from cairn.models.step_cost import Work, step_cost

PROMPTS = (8, 32, 128, 512)


def floor_s(tokens: int, cached: int, rates: Rates) -> tuple[float, float]:
    """Seconds that arithmetic and memory take at least, of one step over one sequence."""
    cost = step_cost(SMALL, [Work(tokens, cached)], 4)
    return cost.flops / rates.flops_per_s, cost.bytes / rates.bytes_per_s


@one_thread()
def run(bench: Workbench) -> Outcome:
    rates = host_rates(bench)
    bench.step("starting a small engine")
    engine = small_engine(SMALL, enable_prefix_caching=False)
    drain(engine, [ask(0, words(16, SMALL.vocab, 0), 4)])  # buffers, threads
    lengths, outputs = bench.pick(PROMPTS, (8, 128)), bench.pick(16, 6)
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


LAB = Lab(
    name="prefill-decode",
    area="serving",
    title=Words("Prefill against decode", "prefill 与 decode 的对比"),
    hypothesis=Words(
        "A prompt is bound by arithmetic and an answer by memory, so a decoded token costs at least as many times a "
        "prompt's token as the two floors say: the whole weights for one decoded token, the same weights shared by "
        "all tokens of a prompt.",
        "prompt 受计算限制，生成受访存限制；单个 token 的代价之比不小于两个下限之比：decode 每个 token "
        "都要读全部权重，prefill 则由整个 prompt 分摊一次读取。",
    ),
    run=run,
    causes=(
        Words(
            "a step of this small model spends much of its time between operations, not in them",
            "模型太小，一步中相当部分时间花在算子之间的开销上",
        ),
        Words(
            "the CPU was shared: rate and bandwidth do not shrink alike",
            "CPU 被其他进程占用，算力与带宽的下降比例不同",
        ),
    ),
    code=(
        "cairn/models/step_cost.py:step_cost",
        "cairn/serve/engine/scheduler.py:Scheduler",
        "cairn/serve/engine/runner.py:Runner",
    ),
    reading=(
        "Efficiently Scaling Transformer Inference (2022)",
        "Roofline: An Insightful Visual Performance Model for Multicore Architectures (2009)",
    ),
    questions=(
        Question(
            Words(
                "What does time to first token depend on, and what does time per output token?",
                "TTFT 由什么决定？TPOT 由什么决定？",
            ),
            Words(
                "TTFT: queueing plus the FLOPs of the prompt over the matmul rate. TPOT: bytes of the weights and "
                "of all KV read in a step over memory bandwidth; an 8B model in bf16 on 4.2 TB/s cannot go below "
                "3.6 ms.",
                "TTFT：排队时间加上 prompt 的 FLOPs 除以矩阵乘速率。TPOT：一步中权重和全部 KV 的字节数除以显存带宽；"
                "8B bf16 模型在 4.2 TB/s 上不可能低于 3.6 毫秒。",
            ),
        ),
        Question(
            Words(
                "Would a GPU with twice the FLOP/s and the same memory help decode?",
                "FLOP/s 翻倍而显存不变的 GPU 能加快 decode 吗？",
            ),
            Words(
                "At small batch hardly: decode sits far left of the ridge. It helps prefill, and it moves the batch "
                "at which decode becomes compute-bound to twice the size.",
                "小批量时几乎没有帮助：decode 远在拐点左侧。它加快 prefill，并把 decode "
                "变为计算受限的批大小推到两倍。",
            ),
        ),
        Question(
            Words(
                "Why are the two phases sometimes run on different machines?",
                "为什么有时把两个阶段放到不同机器上？",
            ),
            Words(
                "They want different things (FLOP/s against bandwidth and memory size) and disturb each other: a "
                "long prompt in a step stalls everybody who decodes in it. Price: the KV cache has to be moved.",
                "它们需要的资源不同（算力 vs 带宽与容量），且互相干扰：一步里混入长 prompt 会让所有 decode 停顿。"
                "代价是要搬运 KV cache。",
            ),
        ),
    ),
    seconds=6.0,
)
