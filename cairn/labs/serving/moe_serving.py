"""A model with 64 experts of which a token visits 4: how many are read in a step?

    1 token     4 experts        a small model's bytes
    n tokens    64 (1 - (1 - 4/64)^n) if they choose alike and independently
    256 tokens  all of them      a large model's bytes, for a small one's FLOPs

The model's own router chooses; visited experts are counted, and bytes are what a step at least reads.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lab, Outcome, Plot, Points, Question, Rows, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.spec import Experts, ModelSpec
from cairn.models.step_cost import weights_read

if TYPE_CHECKING:
    from torch import Generator

    from cairn.models.experts import ExpertLayer

EXPERTS = Experts(count=64, per_token=4, intermediate=32)
SPEC = ModelSpec(
    family="qwen3_moe", vocab=512, hidden=64, layers=1, heads=2, kv_heads=1, head_dim=32,
    intermediate=64, context=4096, qk_norm=True,
    experts=EXPERTS,
)  # fmt: skip


def expected(tokens: int, count: int, per_token: int) -> float:
    return count * (1 - (1 - per_token / count) ** tokens)


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    layer, draw = expert_layer(), torch.Generator().manual_seed(1)
    formula, seen, rows = [], [], []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        bench.step(f"{tokens} tokens in a step")
        visited, busiest = visits(layer, tokens, bench.pick(60, 20), draw)
        formula.append((float(tokens), expected(tokens, EXPERTS.count, EXPERTS.per_token)))
        seen.append((float(tokens), visited))
        read = weights_read(SPEC, tokens) * 2
        rows.append([tokens, formula[-1][1], visited, read / 1e6, busiest])
    x = torch.randn(64, SPEC.hidden, generator=draw)
    one = bench.time(layer, [(x[:1],)], device="cpu", budget_ms=100).p10_s
    many = bench.time(layer, [(x,)], device="cpu", budget_ms=100).p10_s
    return Outcome(
        checks=_checks(dict(seen), many / one), plots=[_plot(formula, seen)], table=_table(rows)
    )


def expert_layer() -> "ExpertLayer":
    """The experts of a model with random weights, with their router."""
    import torch

    from cairn.models.build import Build
    from cairn.models.experts import ExpertLayer
    from cairn.models.transformer import Layer
    from cairn.models.weights import random_model

    first = random_model(SPEC, Build("cpu", torch.float32)).eval().layers[0]
    assert isinstance(first, Layer)
    assert isinstance(first.feed_forward, ExpertLayer)
    return first.feed_forward


def visits(
    layer: "ExpertLayer", tokens: int, repeats: int, draw: "Generator"
) -> tuple[float, float]:
    """Experts that so many drawn tokens visit, and the load of the busiest over the mean: means of many draws."""
    import torch

    counts, busiest = [], []
    with torch.inference_mode():
        for _ in range(repeats):
            _, chosen = layer.router(torch.randn(tokens, SPEC.hidden, generator=draw))
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS.count)
            counts.append(int((load > 0).sum()))
            busiest.append(float(load.max()) * EXPERTS.count / (tokens * EXPERTS.per_token))
    return sum(counts) / repeats, sum(busiest) / repeats


def _checks(found: dict[float, float], slower: float) -> list[Check]:
    return [
        Check(
            what=Words("experts that one token visits", "单个 token 访问的专家数"),
            predicted=EXPERTS.per_token,
            measured=found[1.0],
            unit="experts",
        ),
        Check(
            what=Words("experts that 16 tokens visit", "16 个 token 访问的专家数"),
            predicted=expected(16, EXPERTS.count, EXPERTS.per_token),
            measured=found[16.0],
            unit="experts",
            within=0.1,
        ),
        Check(
            what=Words("experts that 256 tokens visit", "256 个 token 访问的专家数"),
            predicted=EXPERTS.count,
            measured=found[256.0],
            unit="experts",
            within=0.05,
        ),
        Check(
            what=Words(
                "time of 64 tokens over one, at least", "64 个 token 与 1 个的时间比（至少）"
            ),
            # Sixteen times as many experts; what a call costs whatever it reads is the same.
            predicted=3.0,
            measured=slower,
            unit="x",
            kind="at_least",
        ),
    ]


def _plot(formula: Points, seen: Points) -> Plot:
    return Plot(
        title=Words("Experts read in a step", "一步读取的专家数"),
        x=Words("tokens in the step", "一步的 token 数"),
        y=Words("experts", "专家数"),
        lines={"formula": formula, "router": seen},
        log_x=True,
        limit=("all experts", float(EXPERTS.count)),
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("tokens", "token 数"),
            Words("experts foreseen", "预测专家数"),
            Words("experts visited", "实际访问"),
            Words("weights read, MB in bf16", "读取权重（MB，bf16）"),
            Words("busiest expert over the mean", "最忙专家/平均"),
        ],
        rows=rows,
    )


LAB = Lab(
    name="moe-serving",
    area="serving",
    title=Words("How many experts a step reads", "一步要读多少个专家"),
    hypothesis=Words(
        "With k of E experts for a token, n tokens visit E (1 - (1 - k/E)^n) of them: at batch 1 a mixture decodes "
        "at the price of a small model, at some dozens it reads nearly everything.",
        "每 token 选 E 个专家中的 k 个时，n 个 token 访问 E(1-(1-k/E)^n) 个：批 1 时按小模型的代价解码，几十个 "
        "token 时几乎读遍全部。",
    ),
    run=run,
    causes=(
        Words(
            "the router prefers some experts: fewer are visited, and the busiest has more to do",
            "路由偏好部分专家：访问的更少，最忙的更忙",
        ),
        Words("tokens of one text resemble each other", "同一文本的 token 彼此相似"),
    ),
    code=(
        "cairn/models/experts.py:Router",
        "cairn/models/step_cost.py:weights_read",
        "cairn/plan/serve_cost.py:step_seconds",
    ),
    reading=(
        "Mixtral of Experts (2024)",
        "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models (2024)",
    ),
    questions=(
        Question(
            Words(
                "Where does a mixture gain most in serving: batch 1 or batch 256?",
                "MoE 在哪种批大小下收益最大：1 还是 256？",
            ),
            Words(
                "In bytes at batch 1 (only the chosen experts are read), in FLOPs at 256 (all are read, but each "
                "token computes with few). In between it reads like a large model and computes like a small one.",
                "批 1 时省字节（只读选中的专家），批 256 时省 FLOPs（全都要读，但每 token 只算几个）。"
                "中间地带读得像大模型、算得像小模型。",
            ),
        ),
        Question(
            Words(
                "Why spread experts over GPUs instead of splitting each?",
                "为什么把专家分散到多卡，而不是把每个专家切开？",
            ),
            Words(
                "Whole experts keep large products; each GPU reads only its own, and a larger joint batch gives "
                "every expert more rows. Price: two all-to-alls a layer and the wait for the busiest GPU.",
                "完整的专家保持大矩阵乘；每卡只读自己的，合并后的大批让每个专家有更多行。代价是每层两次 all-to-all "
                "和等待最忙的卡。",
            ),
        ),
        Question(
            Words("What do shared experts do?", "共享专家有什么作用？"),
            Words(
                "Every token visits them, so common knowledge need not be repeated in each routed expert; their "
                "weights are read once for the whole batch like a dense layer's.",
                "每个 token 都经过它们，公共知识不必在各路由专家里重复；它们的权重像稠密层一样整批只读一次。",
            ),
        ),
    ),
    seconds=2.0,
)
