"""How much of the machine does training use? Count the FLOPs exactly, time a step, divide by what matmul reaches.

    MFU = FLOPs of the model, forward and backward / (seconds * peak)         6 N T is the rule of thumb

The counted FLOPs of the spec are held against torch's own counter, operation by operation. Then real steps of two sizes
run: small products waste most of the machine, larger ones less.
"""

from typing import Any

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench


def shape(hidden: int, layers: int) -> Any:
    import msgspec

    from cairn.models.presets import preset

    return msgspec.structs.replace(
        preset("tiny-qwen3"),
        hidden=hidden,
        layers=layers,
        heads=hidden // 32,
        kv_heads=hidden // 32,
        head_dim=32,
        intermediate=3 * hidden,
        vocab=512,
        context=512,
    )


def step_of(spec: Any, tokens: int) -> Any:
    """A call that does forward and backward of one sequence."""
    import torch

    from cairn.train.data.batch import make_batch
    from cairn.train.objective import Objective
    from cairn.train.parallel.mesh import Mesh
    from cairn.train.parallel.parallelize import parallelize

    parallel = parallelize(spec, Mesh.alone(), seed=0)
    ids = torch.randint(spec.vocab, (tokens + 1,), generator=torch.Generator().manual_seed(0))
    batch, loss = make_batch(ids[:-1], ids[1:], [tokens], [0]), Objective(spec)

    def step() -> None:
        parallel.forward_backward([batch], loss, torch.tensor(float(tokens)))
        parallel.zero_grad()

    return step


@one_thread()
def run(bench: Workbench) -> Outcome:
    from torch.utils.flop_counter import FlopCounterMode

    from cairn.train.flops import step_flops

    tokens = bench.setting("tokens", bench.pick(128, 64))
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


LAB = described(__file__, run)
