"""Can a planner choose the layout? Search all of them with the same cost code that the simulator and trainer use.

    dp x fsdp x pp x cp x tp x recompute x microbatch:  cannot | does not fit | slower, and by which part

The planner's times are held against published multi-GPU runs it was not fitted to, and its choice against what a person
would take by habit.
"""

import time
from statistics import median

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
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

    model, gpus = "qwen3-8b", bench.pick(64, 16)
    gpu, job = device("h200"), Job(spec=preset(model), sequence=4096, sequences=1024)
    bench.step(f"{model} on {gpus} H200: every layout")
    began = time.perf_counter()
    plan = search(job, gpus, gpu)
    seconds = time.perf_counter() - began
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
            what=Words("seconds of the search", "搜索耗时"),
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


LAB = Lab(
    name="auto-parallel",
    area="training",
    title=Words("Letting a planner choose the layout", "让规划器选择并行布局"),
    hypothesis=Words(
        "Searching every layout of 8B on 64 GPUs takes seconds, its cost model is within 20% of published runs, and at "
        "least one layout that people take by habit is a tenth slower than the best.",
        "64 卡 8B 模型的全部布局几秒内即可搜完，代价模型与公开数据误差在 20% 以内，且至少有一种"
        "习惯布局比最优慢 10% 以上。",
    ),
    run=run,
    causes=(
        Words(
            "published stacks differ in kernels and overlap, which a few constants cannot all know",
            "公开数据的软件栈各异，少数常数无法全部覆盖",
        ),
        Words("a busy machine makes the search itself slower", "机器繁忙会拖慢搜索本身"),
    ),
    code=(
        "cairn/plan/train_search.py:search",
        "cairn/plan/train_cost.py:step_time",
        "cairn/plan/train_memory.py:rank_memory",
    ),
    reading=(
        "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning (2022)",
        "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM (2021)",
    ),
    questions=(
        Question(
            Words(
                "What does Alpa search that a grid of dp x pp x tp does not?",
                "Alpa 搜索的内容比 dp x pp x tp 网格多了什么？",
            ),
            Words(
                "Sharding of each operator (an integer program inside a stage) and where to cut the stages (dynamic "
                "programming); for uniform transformers the grid finds nearly the same plans.",
                "每个算子的切分方式（stage 内整数规划）和 stage 的切点（动态规划）；对结构均匀"
                "的 transformer，网格搜索结果几乎相同。",
            ),
        ),
        Question(
            Words("In which order do you rule out layouts by hand?", "手工排除布局时按什么顺序？"),
            Words(
                "Memory first (states, then activations), then tp within a node and only as "
                "much as needed, then pp until "
                "it fits, cp for long sequences, and data parallel with what is left.",
                "先看内存（状态，再激活），tp 只在节点内且够用即可，放不下再加 pp，长序列加 cp，剩下的给数据并行。",
            ),
        ),
        Question(
            Words(
                "Why is pure data parallel often the fastest when it fits?",
                "放得下时为什么纯数据并行往往最快？",
            ),
            Words(
                "It has no bubble and its collectives hide behind backward; every other way of "
                "sharing puts communication "
                "or idling on the critical path.",
                "没有气泡，通信可被反向掩盖；其他并行方式都会把通信或空闲放到关键路径上。",
            ),
        ),
    ),
    seconds=5.0,
)
