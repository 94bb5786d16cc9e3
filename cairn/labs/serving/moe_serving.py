"""A model with 64 experts of which a token visits 4: how many are read in a step?

    1 token     4 experts        a small model's bytes
    n tokens    64 (1 - (1 - 4/64)^n) if they choose alike and independently
    256 tokens  all of them      a large model's bytes, for a small one's FLOPs

The serving layer's own router, sort and grouped product run here. Visited experts are counted; weights of the others
are overwritten with NaN, which would be seen if the product read them; the result is held against one expert after
another; and loads of ranks are those of the placement that expert-parallel serving uses. On a GPU the grouped kernel is
timed, too.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.expert_placement import evenly, place
from cairn.models.spec import Experts, ModelSpec
from cairn.models.step_cost import weights_read

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from cairn.models.experts import ExpertLayer

EXPERTS = Experts(count=64, per_token=4, intermediate=128)
RANKS, SLOTS = 8, 10  # of expert-parallel serving: two slots of each rank are for copies
SPEC = ModelSpec(
    family="qwen3_moe",
    vocab=512,
    hidden=256,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=256,
    context=4096,
    qk_norm=True,
    experts=EXPERTS,
)


def expected(tokens: int, count: int, per_token: int) -> float:
    return count * (1 - (1 - per_token / count) ** tokens)


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    layer, draw = expert_layer(), torch.Generator().manual_seed(1)
    formula, measured, rows = [], [], []
    for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        bench.step(f"{tokens} tokens in a step")
        visited, busiest = visits(layer, tokens, bench.pick(60, 20), draw)
        formula.append((float(tokens), expected(tokens, EXPERTS.count, EXPERTS.per_token)))
        measured.append((float(tokens), visited))
        read = weights_read(SPEC, tokens) * 2
        rows.append([tokens, formula[-1][1], visited, read / 1e6, busiest])
    bench.step("the grouped product, with and without the experts that no token chose")
    x_TD = torch.randn(64, SPEC.hidden, generator=draw)
    wrong, touched = differs(layer, x_TD[:16]), reads_others(layer, x_TD[:8])
    one = bench.time(layer, [(x_TD[:1],)], device="cpu", budget_ms=100).p10_s
    many = bench.time(layer, [(x_TD,)], device="cpu", budget_ms=100).p10_s
    checks = [*_visited(dict(measured)), *_computed(wrong, touched, many / one), *_balance()]
    if bench.on_gpu:
        checks.append(_kernel(bench))
    return Outcome(checks=checks, plots=[_plot(formula, measured)], table=_table(rows))


def expert_layer() -> "ExpertLayer":
    """The experts of a model with random weights, with their router."""
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.experts import ExpertLayer
    from cairn.models.transformer import Layer
    from cairn.models.weights import random_model

    first = random_model(SPEC, ModelBuild("cpu", torch.float32)).eval().layers[0]
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


def differs(layer: "ExpertLayer", x_TD: "Tensor") -> int:
    """Rows in which the grouped form is not what one expert after another computes."""
    import torch

    with torch.inference_mode():
        weights_TN, chosen_TN = layer.router(x_TD)
        expected_TD = torch.zeros_like(x_TD)
        for token, (weights_N, chosen_N) in enumerate(zip(weights_TN, chosen_TN, strict=True)):
            for weight, expert in zip(weights_N, chosen_N.tolist(), strict=True):
                expected_TD[token] += weight * layer.expert(expert, x_TD[token])
        close = torch.isclose(layer(x_TD), expected_TD, rtol=1e-3, atol=1e-5)
    return int((~close.all(-1)).sum())


def reads_others(layer: "ExpertLayer", x_TD: "Tensor") -> int:
    """Numbers of the result that change when experts that no token chose hold NaN."""
    import torch

    with torch.inference_mode():
        before_TD = layer(x_TD)
        chosen = set(layer.router(x_TD)[1].flatten().tolist())
        others = [expert for expert in range(EXPERTS.count) if expert not in chosen]
        kept = layer.inner_EFD[others].clone()
        layer.inner_EFD[others] = torch.nan
        after_TD = layer(x_TD)
        layer.inner_EFD[others] = kept
    return int((before_TD != after_TD).sum())


def rank_loads(skew: float) -> tuple[float, float]:
    """The busiest of the ranks over their mean, if visits fall as rank ** -skew: neighbours together, and placed."""
    visits = [(1.0 + expert) ** -skew for expert in range(EXPERTS.count)]
    ratios = []
    for placement in (evenly(EXPERTS.count, RANKS), place(visits, RANKS, SLOTS)):
        loads = placement.loads(visits)
        ratios.append(max(loads) * RANKS / sum(loads))
    return ratios[0], ratios[1]


def _visited(measured: dict[float, float]) -> list[Check]:
    return [
        Check(
            what=Words("experts that one token visits", "单个 token 访问的专家数"),
            predicted=EXPERTS.per_token,
            measured=measured[1.0],
            unit="experts",
        ),
        Check(
            what=Words("experts that 16 tokens visit", "16 个 token 访问的专家数"),
            predicted=expected(16, EXPERTS.count, EXPERTS.per_token),
            measured=measured[16.0],
            unit="experts",
            within=0.1,
        ),
        Check(
            what=Words("experts that 256 tokens visit", "256 个 token 访问的专家数"),
            predicted=EXPERTS.count,
            measured=measured[256.0],
            unit="experts",
            within=0.05,
        ),
    ]


def _computed(wrong: int, touched: int, slower: float) -> list[Check]:
    return [
        Check(
            what=Words(
                "rows that one expert after another computes otherwise",
                "与逐个专家计算不同的行数",
            ),
            predicted=0,
            measured=wrong,
            unit="rows",
        ),
        Check(
            what=Words(
                "numbers that change when unchosen experts hold NaN",
                "未选专家置为 NaN 后改变的数",
            ),
            predicted=0,
            measured=touched,
            unit="numbers",
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


def _balance() -> list[Check]:
    """Zipf's law, exponent 1: the first expert has a fifth of all visits."""
    apart, placed = rank_loads(1.0)
    return [
        Check(
            what=Words(
                "busiest rank over the mean, neighbours together, at least",
                "最忙 rank/平均（相邻专家同 rank，至少）",
            ),
            predicted=2.0,
            measured=apart,
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words(
                "busiest rank over the mean, placed with copies, at most",
                "最忙 rank/平均（按负载放置并复制，至多）",
            ),
            predicted=1.1,
            measured=placed,
            unit="x",
            kind="at_most",
        ),
    ]


def _kernel(bench: Workbench) -> Check:
    """Decode of 16 tokens at Qwen3-30B-A3B's sizes by the serving kernel: weights of visited experts over time."""
    import torch

    from cairn.kernels.experts.grouped_matmul import Gating, grouped_matmul
    from cairn.kernels.experts.sort_pairs import sort_pairs

    bench.step("the grouped kernel on the GPU")
    make = {"device": bench.device, "dtype": torch.bfloat16}
    w_ENK, x_TD = torch.randn(128, 1536, 2048, **make), torch.randn(16, 2048, **make)
    chosen_TK = torch.rand(16, 128, device=bench.device).topk(8).indices.int()
    pairs = sort_pairs(chosen_TK, 128)
    seconds = bench.time(
        lambda: grouped_matmul(x_TD, w_ENK, pairs, gather=True, gating=Gating())
    ).median_s
    read = len(chosen_TK.unique()) * w_ENK[0].nbytes
    copied = torch.empty_like(w_ENK)
    copy_s = bench.time(lambda: copied.copy_(w_ENK)).median_s
    return Check(
        what=Words(
            "rate of the grouped kernel over a copy's, at least",
            "分组 kernel 的带宽/拷贝带宽（至少）",
        ),
        predicted=0.6,
        measured=read / seconds / (2 * w_ENK.nbytes / copy_s),
        unit="x",
        kind="at_least",
    )


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


LAB = described(__file__, run)
