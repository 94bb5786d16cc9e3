"""What does a model of a shape cost? Parameters and FLOPs by formula, beside the built model and a counter."""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Table, Words
from cairn.labs.llm import _tiny
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

WIDTHS = (32, 64, 128, 256)


@one_thread()
def run(bench: Workbench) -> Outcome:
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    rows, exact, counted, rule = [], [], [], []
    tokens = _tiny.all_sums().repeat(1, 4)[: bench.pick(32, 8)]
    for width in bench.pick(WIDTHS, WIDTHS[:3]):
        bench.step(f"width {width}")
        spec = _tiny.small_spec(
            hidden=width, heads=width // 16, kv_heads=width // 32, intermediate=2 * width
        )
        model = _tiny.build(spec)
        built = sum(parameter.numel() for parameter in model.parameters())
        # The counter knows plain products only, so attention is done in those.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            _tiny.logits(model, tokens).sum().backward()
        formula = len(tokens) * spec.training_flops(tokens.shape[1])
        rows.append([width, spec.parameters(), built, formula, counter.get_total_flops()])
        exact.append(built / spec.parameters())
        counted.append(counter.get_total_flops() / formula)
        rule.append((float(spec.parameters()), 6 * spec.parameters() * tokens.numel() / formula))
    return Outcome(
        checks=_checks(exact, counted),
        plots=[
            Plot(
                title=Words("The rule 6N against the exact count", "6N 经验法则与精确值之比"),
                x=Words("parameters", "参数量"),
                y=Words("6N / exact", "6N / 精确值"),
                lines={"6N per token": rule},
                log_x=True,
                limit=("exact", 1.0),
            )
        ],
        table=Table(
            columns=[
                Words("width", "宽度"),
                Words("parameters, formula", "参数量（公式）"),
                Words("built", "实际"),
                Words("FLOPs, formula", "FLOP（公式）"),
                Words("counted", "统计"),
            ],
            rows=rows,
        ),
        notes=[_note()],
    )


def _checks(exact: list[float], counted: list[float]) -> list[Check]:
    return [
        Check(
            what=Words(
                "parameters of the built model against the formula",
                "构建出的模型参数量与公式之比",
            ),
            predicted=1.0,
            measured=max(exact, key=lambda x: abs(x - 1)),
            unit="x",
        ),
        Check(
            what=Words(
                "FLOPs that torch counted against the formula", "torch 统计的 FLOP 与公式之比"
            ),
            predicted=1.0,
            measured=max(counted, key=lambda x: abs(x - 1)),
            unit="x",
            within=0.12,
        ),
    ]


def _note() -> Words:
    return Words(
        "torch counts the masked half of attention too; for rows this short that is little.",
        "torch 也统计被掩码的那一半注意力；序列很短时差别不大。",
    )


LAB = Lab(
    name="scaling",
    area="llm",
    title=Words("Parameters, FLOPs, and the rule 6N", "参数量、FLOP 与 6N 法则"),
    hypothesis=Words(
        "The spec's formulas give the parameters of the built model exactly and its "
        "training FLOPs as an independent counter finds them; 6N per token is the "
        "large-model limit of that.",
        "由模型规格算出的参数量与构建出的模型完全一致，训练 FLOP 与独立计数器一致；每 "
        "token 6N 是其大模型极限。",
    ),
    run=run,
    causes=(
        Words(
            "attention's share: the counter counts masked pairs, the formula does not",
            "注意力部分：计数器统计了被掩码的对，公式没有",
        ),
        Words(
            "a tied head that is counted once as parameters and twice as work",
            "共享的输出层：参数只算一次，计算却发生两次",
        ),
    ),
    code=(
        "cairn/models/spec.py:ModelSpec.parameters",
        "cairn/models/spec.py:ModelSpec.training_flops",
        "cairn/train/flops.py:step_flops",
    ),
    reading=(
        "Training Compute-Optimal Large Language Models (2022)",
        "Scaling Laws for Neural Language Models (2020)",
    ),
    questions=(
        Question(
            Words("Where does 6N come from?", "6N 是怎么来的？"),
            Words(
                "Two FLOPs per parameter and token forward, twice that backward (gradients of "
                "inputs and of weights).",
                "前向每参数每 token 2 FLOP，反向两倍（对输入与对权重的梯度）。",
            ),
        ),
        Question(
            Words("What did Chinchilla change?", "Chinchilla 改变了什么？"),
            Words(
                "Loss is least for a given compute when tokens grow with parameters, about 20 "
                "tokens per parameter; earlier models were too large for their data.",
                "给定算力下，token 数应与参数量同步增长，约每参数 20 个 token；此前的模型相对数"
                "据太大。",
            ),
        ),
        Question(
            Words(
                "Why do people train small models far beyond that point?",
                "为什么人们把小模型训练到远超该点？",
            ),
            Words(
                "The compute-optimal point counts training only; a smaller model trained "
                "longer is cheaper to serve for the rest of its life.",
                "算力最优只计训练成本；更小但训练更久的模型在之后的服务中一直更便宜。",
            ),
        ),
    ),
    seconds=3.0,
)
