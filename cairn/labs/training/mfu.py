"""How much of the machine does training use? Count the FLOPs exactly, time a step, divide by what matmul reaches.

    MFU = FLOPs of the model, forward and backward / (seconds * peak)         6 N T is the rule of thumb

The counted FLOPs of the spec are held against torch's own counter, operation by operation. Then real steps of two sizes
run: small products waste most of the machine, larger ones less.
"""

from typing import Any

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


def shape(hidden: int, layers: int) -> Any:
    import msgspec

    from cairn.models.presets import preset

    return msgspec.structs.replace(
        preset("tiny-qwen3"), hidden=hidden, layers=layers, heads=hidden // 32, kv_heads=hidden // 32,
        head_dim=32, intermediate=3 * hidden, vocab=512, context=512,
    )  # fmt: skip


def step_of(spec: Any, tokens: int) -> Any:
    """A call that does forward and backward of one sequence."""
    import torch

    from cairn.models.build import Build
    from cairn.models.weights import random_model
    from cairn.train.data.batch import make_batch
    from cairn.train.loss import NextToken
    from cairn.train.parallel.alone import Alone

    parallel = Alone(random_model(spec, Build("cpu", torch.float32), 0))
    ids = torch.randint(spec.vocab, (tokens + 1,), generator=torch.Generator().manual_seed(0))
    batch, loss = make_batch(ids[:-1], ids[1:], [tokens], [0]), NextToken(spec)

    def step() -> None:
        parallel.forward_backward([batch], loss, torch.tensor(float(tokens)))
        parallel.zero_grad()

    return step


@one_thread()
def run(bench: Workbench) -> Outcome:
    from torch.utils.flop_counter import FlopCounterMode

    from cairn.train.flops import step_flops

    tokens = bench.pick(128, 64)
    shapes = {"hidden 64": shape(64, 2), "hidden 256": shape(256, 2)}
    peak = _product_rate(bench)
    rows, rates = [], []
    counted = expected = 0.0
    for name, spec in shapes.items():
        step = step_of(spec, tokens)
        flops = step_flops(spec, [tokens])
        with FlopCounterMode(display=False) as counter:
            step()
        by_op = counter.get_flop_counts()["Global"]
        counted = float(sum(by_op[op] for op in by_op if str(op).endswith(("mm", "addmm"))))
        expected = float(flops) - _attention_flops(spec, tokens)
        bench.step(f"{name}: steps of {tokens} tokens")
        seconds = bench.time(step, device="cpu", budget_ms=600).p10_s
        rule = 6.0 * (spec.parameters() - spec.vocab * spec.hidden * (not spec.tied)) * tokens
        rates.append(flops / seconds)
        rows.append(
            [
                name,
                spec.parameters(),
                flops / 1e9,
                counted / 1e9,
                rule / flops,
                seconds * 1e3,
                flops / seconds / peak,
            ]
        )
    return Outcome(
        checks=_checks(expected, counted, rates, rows),
        table=Table(
            columns=[
                Words("model", "模型"),
                Words("parameters", "参数量"),
                Words("GFLOP a step", "每步 GFLOP"),
                Words("torch counts", "torch 计数"),
                Words("6NT over exact", "6NT 与精确值之比"),
                Words("ms", "毫秒"),
                Words("MFU", "MFU"),
            ],
            rows=rows,
        ),
    )


def _checks(
    expected: float, counted: float, rates: list[float], rows: list[list[Any]]
) -> list[Check]:
    return [
        Check(
            what=Words(
                "products by the spec against torch's counter",
                "公式中的矩阵乘 FLOPs 与 torch 计数",
            ),
            predicted=expected / 1e9,
            measured=counted / 1e9,
            unit="GFLOP",
            within=0.001,
        ),
        Check(
            what=Words("rate of the larger model over the smaller", "大模型与小模型的速率比"),
            predicted=1.2,
            measured=rates[1] / rates[0],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("MFU stays below one", "MFU 小于 1"),
            predicted=1.0,
            measured=rows[-1][-1],
            unit="share",
            kind="at_most",
            within=0.3,  # of a machine that may be less busy a second later
        ),
    ]


def _product_rate(bench: Workbench) -> float:
    """What a large product reaches here and now, on as many threads as the steps have."""
    import torch

    a = torch.randn(512, 512)
    return 2 * 512**3 / bench.time(torch.matmul, [(a, a)], device="cpu").p10_s


def _attention_flops(spec: Any, tokens: int) -> float:
    """Of the pairs that a causal mask leaves: two products forward, twice that backward. torch counts them by kernel,
    masked or not, so they are left out of the comparison."""
    pairs = tokens * (tokens + 1) / 2
    return 3 * 2 * 2 * pairs * spec.heads * spec.head_dim * spec.layers


LAB = Lab(
    name="mfu",
    area="training",
    title=Words("Model FLOPs utilisation", "MFU：模型算力利用率"),
    hypothesis=Words(
        "The spec's closed form counts a training step's FLOPs exactly as torch's counter "
        "does, product by product, and a model four times as wide "
        "runs at a higher rate because its products are larger; 6NT alone leaves out attention.",
        "规格给出的解析式与 torch 计数器逐个矩阵乘完全一致；宽度四倍的模型因矩阵更大而速率更高；"
        "6NT 只是近似，没有算注意力。",
    ),
    run=run,
    causes=(
        Words(
            "torch's counter and the formula disagree about which operations count",
            "torch 计数器与公式对哪些算子计入 FLOPs 口径不同",
        ),
        Words(
            "a busy machine, or small products that are bound by their start and not by arithmetic",
            "机器繁忙，或小矩阵受启动开销而非算力限制",
        ),
    ),
    code=(
        "cairn/train/flops.py:step_flops",
        "cairn/models/spec.py:ModelSpec",
        "cairn/plan/train_cost.py:step_time",
    ),
    reading=(
        "PaLM: Scaling Language Modeling with Pathways (2022)",
        "Scaling Laws for Neural Language Models (2020)",
    ),
    questions=(
        Question(
            Words("What is the difference between MFU and HFU?", "MFU 和 HFU 有什么区别？"),
            Words(
                "MFU counts what the model needs; HFU also counts what was computed again by recomputation, so full "
                "recomputation shows HFU a third above MFU for the same speed.",
                "MFU 只算模型本身需要的 FLOPs；HFU 还算重计算的部分，全量重计算时同样速度下 HFU 比 MFU 高约三分之一。",
            ),
        ),
        Question(
            Words("Where does 6N come from?", "6N 从何而来？"),
            Words(
                "A multiply-add for each weight and token forward (2), and two products backward, for inputs and for "
                "weights (4). Attention's pairs come on top, and grow with the sequence.",
                "前向每个权重每 token 一次乘加（2），反向对输入和权重各一次（4）；注意力的配对另算，随序列长度增长。",
            ),
        ),
        Question(
            Words(
                "A run shows 35% MFU on H200. What do you look at first?",
                "H200 上只有 35% MFU，先看什么？",
            ),
            Words(
                "The timeline: gaps (data, host, launches), exposed communication, then the "
                "share of attention and small "
                "products; compare each with its ceiling before changing anything.",
                "先看时间线：空隙（数据、主机、launch）和暴露的通信，再看注意力与小矩阵的占比；"
                "逐项与上限对比后再动手。",
            ),
        ),
    ),
    seconds=6.0,
)
