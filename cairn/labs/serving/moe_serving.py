"""A model with 64 experts of which a token visits 4: how many are read in a step?

    1 token     4 experts        a small model's bytes
    n tokens    64 (1 - (1 - 4/64)^n) if they choose alike and independently
    256 tokens  all of them      a large model's bytes, for a small one's FLOPs

The model's own router chooses; visited experts are counted, and bytes are what a step at least reads.
"""

from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Points, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.spec import Experts, ModelSpec
from cairn.models.step_cost import weights_read

if TYPE_CHECKING:
    from torch import Generator

    from cairn.models.experts import ExpertLayer

EXPERTS = Experts(count=64, per_token=4, intermediate=32)
SPEC = ModelSpec(
    family="qwen3_moe",
    vocab=512,
    hidden=64,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=64,
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


LAB = described(__file__, run)
