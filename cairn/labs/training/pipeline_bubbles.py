"""How much of a pipeline stands idle, and what makes it less? Formula, simulator, and threads that really wait.

    idle share of GPipe and 1F1B          (p-1) / (m + p-1)
    interleaved with v chunks             (p-1) / (v*m + p-1)
    activations kept by the first rank    GPipe: m      1F1B: at most p

The schedules are the lists of actions that the trainer runs. Here each action sleeps as long as it would compute.
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
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


LAB = Lab(
    name="pipeline-bubbles",
    area="training",
    title=Words("Bubbles of a pipeline", "流水线气泡"),
    hypothesis=Words(
        "GPipe and 1F1B idle (p-1)/(m+p-1) of the time and differ only in memory; interleaving "
        "v chunks divides the fill "
        "and drain by v. Threads that run the real schedules wait as long as the formula says.",
        "GPipe 与 1F1B 的空闲比例都是 (p-1)/(m+p-1)，差别只在内存；交错 v 个 chunk 使填充与排空"
        "时间除以 v。按真实调度执行的线程，等待时间与公式一致。",
    ),
    run=run,
    causes=(
        Words(
            "threads wake late on a busy machine, and every wake-up is on the critical path",
            "机器繁忙时线程唤醒延迟，而每次唤醒都在关键路径上",
        ),
        Words(
            "stages of unequal length: the longest one sets the pace",
            "stage 长短不一：最长的决定节奏",
        ),
    ),
    code=(
        "cairn/train/parallel/pipeline/orders.py:one_f_one_b",
        "cairn/train/parallel/pipeline/orders.py:interleaved",
        "cairn/train/parallel/pipeline/simulate.py:simulate",
        "cairn/train/parallel/pipeline/run.py:Pipeline",
    ),
    reading=(
        "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism (2019)",
        "PipeDream: Generalized Pipeline Parallelism for DNN Training (2019)",
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021)",
    ),
    questions=(
        Question(
            Words(
                "8 stages: how many micro-batches for a bubble below 10%?",
                "8 个 stage，要让气泡低于 10% 需要多少 micro-batch？",
            ),
            Words(
                "7/(m+7) < 0.1 gives m > 63, so 64; interleaved with 4 chunks it is 16.",
                "7/(m+7) < 0.1，即 m > 63，取 64；4 个 chunk 交错时 16 个即可。",
            ),
        ),
        Question(
            Words(
                "Why is 1F1B preferred to GPipe although the bubble is the same?",
                "气泡相同，为什么 1F1B 优于 GPipe？",
            ),
            Words(
                "A stage keeps activations of at most p micro-batches in place of all m, so m "
                "can grow until the bubble is "
                "small without memory growing with it.",
                "每个 stage 最多保存 p 个而不是 m 个 micro-batch 的激活，所以可以加大 m 来压低气泡而内存不增长。",
            ),
        ),
        Question(
            Words("What does interleaving cost?", "交错调度的代价是什么？"),
            Words(
                "v times as many messages between stages, a little more memory for activations "
                "in flight, and a number of "
                "micro-batches that is a multiple of the stages.",
                "stage 间消息次数变为 v 倍，在途激活略多，且 micro-batch 数必须是 stage 数的倍数。",
            ),
        ),
    ),
    seconds=3.0,
)
