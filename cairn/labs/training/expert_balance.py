"""What does an unbalanced router cost, and does a bias that steers it help? The busiest expert sets the pace.

    time of an expert layer on n ranks = tokens of the busiest rank / rate        balanced: the mean
    bias += rate * sign(mean load - load)      after every step, for choosing only (DeepSeek)

A router that prefers some experts sees the same stream of tokens with and without steering; every choice is counted.
"""

from typing import Any

from cairn.labs.lab import Check, Lines, Outcome, Plot, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

EXPERTS, PER_TOKEN, RANKS = 16, 2, 4


def skewed_router(rate: float) -> Any:
    """A router whose weights prefer low numbers, and so would be a hot spot."""
    import msgspec
    import torch

    from cairn.models.build import ModelBuild
    from cairn.models.presets import preset
    from cairn.models.spec import Experts
    from cairn.train.parallel.balance import BalancedRouter

    experts = Experts(count=EXPERTS, per_token=PER_TOKEN, intermediate=32, choice_bias=True)
    spec = msgspec.structs.replace(preset("tiny-qwen3"), experts=experts)
    router: Any = BalancedRouter(ModelBuild("cpu", torch.float32), spec, experts, 0.0, rate, None)
    torch.manual_seed(0)
    with torch.no_grad():
        router.bias_E.zero_()
        router.weight.normal_(std=0.05)
        router.weight[:, 0] += torch.linspace(0.5, -0.5, EXPERTS)
    return router


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    tokens, steps = 1024, bench.setting("steps", bench.pick(240, 160))
    curves: dict[str, list[tuple[float, float]]] = {}
    lost, rows = 0, []
    for name, rate in (("plain", 0.0), ("steered", 0.004)):
        bench.step(f"{name}: {steps} steps of {tokens} tokens")
        router = skewed_router(rate)
        generator = torch.Generator().manual_seed(1)
        line = []
        for step in range(steps):
            x = torch.randn(tokens, router.weight.shape[1], generator=generator)
            x[:, 0] = x[:, 0].abs() + 1.0  # all tokens agree about the preferred experts
            _, chosen = router(x)
            load = torch.bincount(chosen.flatten(), minlength=EXPERTS).float()
            lost += int(tokens * PER_TOKEN - load.sum())
            by_rank = load.view(RANKS, -1).sum(1)
            line.append((float(step), float(by_rank.max() / by_rank.mean())))
            router.steer(None)
        curves[name] = line
        rows.append(
            [name, line[0][1], sum(y for _, y in line[-10:]) / 10, float(load.max() / load.mean())]
        )
    settled = rows[1][2]
    return Outcome(
        checks=_checks(settled, rows, lost),
        plots=[_plot(curves)],
        table=Table(
            columns=[
                Words("router", "路由器"),
                Words("first step", "第一步"),
                Words("last steps", "最后几步"),
                Words("busiest expert", "最忙专家"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                f"an expert layer without steering takes {rows[0][2] / settled:.2f} times as long as with it",
                f"没有偏置调节时，专家层耗时是有调节的 {rows[0][2] / settled:.2f} 倍",
            )
        ],
    )


def _checks(settled: float, rows: list[list[Any]], lost: int) -> list[Check]:
    return [
        Check(
            what=Words(
                "steered: busiest rank over the mean, at the end",
                "有偏置：最后阶段最忙 rank 与均值之比",
            ),
            predicted=1.0,
            measured=settled,
            unit="x",
            kind="at_most",
            within=0.25,
        ),
        Check(
            what=Words("plain: busiest rank over the mean", "无偏置：最忙 rank 与均值之比"),
            predicted=1.5,
            measured=rows[0][2],
            unit="x",
            kind="at_least",
        ),
        Check(
            what=Words("choices that were dropped", "被丢弃的路由选择"),
            predicted=0,
            measured=lost,
            unit="tokens",
        ),
    ]


def _plot(curves: Lines) -> Plot:
    return Plot(
        title=Words("Busiest rank of four", "四个 rank 中最忙者"),
        x=Words("step", "步"),
        y=Words("times the mean load", "均值的倍数"),
        lines=curves,
        limit=("balanced", 1.0),
    )


LAB = described(__file__, run)
