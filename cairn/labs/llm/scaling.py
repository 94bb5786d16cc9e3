"""What does a model of a shape cost? Parameters and FLOPs by formula, beside the built model and a counter."""

from cairn.labs.lab import Check, Outcome, Plot, Table, Words, described
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


LAB = described(__file__, run)
