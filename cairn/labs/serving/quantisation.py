"""What do 8 and 4 bits for a weight cost in accuracy, and what do they save?

    levels between -m and m of a row (int8), or between low and high of a group of 32 (int4)
    rounding is off by up to half a step, evenly: mean square error = step^2 / 12

So the error is known before anything is rounded. Bytes are exact; the loss of a trained model says whether it matters.
"""

import math

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

ROWS, COLUMNS = 1024, 1024
TEXT = (
    "Once upon a time there was a little girl who lived near the forest. Every day she went to the river to play "
    "with her friends. One day she found a small box under a tree. She opened it and saw a shiny key inside."
)


def uniform_error(span: float, levels: int) -> float:
    """Root mean square of the rounding error of `levels` even steps over `span`."""
    return span / levels / math.sqrt(12)


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.linear.packed import Levels

    weight_NK = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    bench.step("rounding a matrix")
    step_N1 = weight_NK.abs().amax(1, keepdim=True) / 127
    error8 = float(((weight_NK / step_N1).round() * step_N1 - weight_NK).pow(2).mean().sqrt())
    error4 = float((Levels(weight_NK).weight_NK() - weight_NK).pow(2).mean().sqrt())
    # Of n draws from a normal distribution, the largest magnitude and the range, by tables of order statistics.
    foreseen8 = uniform_error(2 * 3.45, 254)  # the largest of 1024: about 3.45 sigma
    # A group of 32 spans about 4.14 sigma, and its two ends are levels themselves: no error.
    foreseen4 = uniform_error(4.14, 15) * math.sqrt(30 / 32)
    losses, bits, speed = _of_a_model(bench)
    rows = [
        ["float32", 32.0, 0.0, losses["float"], 1.0],
        ["int8", bits["int8"], error8, losses["int8"], speed["int8"]],
        ["int4", bits["int4"], error4, losses["int4"], speed["int4"]],
    ]
    return Outcome(
        checks=[
            *_rounding(foreseen8, error8, foreseen4, error4),
            *_loss(losses["int8"] - losses["float"]),
        ],
        table=Table(
            columns=[
                Words("weights", "权重"),
                Words("bits of a weight, scales included", "每权重比特数（含 scale）"),
                Words("rounding error, sigma", "舍入误差（sigma）"),
                Words("loss of cairn-tiny, nats", "cairn-tiny 的损失（nats）"),
                Words("speed of one row against float32", "单行乘法相对 float32 的速度"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                "Activations are rounded to 8 bits per token as well (W8A8, W4A8); the few columns that are far "
                "larger than the rest are multiplied in float32.",
                "激活也按 token 舍入到 8 比特（W8A8、W4A8）；少数远大于其他列的激活列用 float32 单独相乘。",
            )
        ],
    )


def _rounding(foreseen8: float, error8: float, foreseen4: float, error4: float) -> list[Check]:
    from cairn.models.linear.packed import GROUP

    return [
        Check(
            what=Words("rounding error of int8 rows", "int8（按行）的舍入误差"),
            predicted=foreseen8,
            measured=error8,
            unit="sigma",
            within=0.05,
        ),
        Check(
            what=Words(
                f"rounding error of int4 groups of {GROUP}",
                f"int4（每 {GROUP} 个一组）的舍入误差",
            ),
            predicted=foreseen4,
            measured=error4,
            unit="sigma",
            within=0.08,
        ),
        Check(
            what=Words("error of int4 over int8", "int4 与 int8 的误差之比"),
            predicted=foreseen4 / foreseen8,
            measured=error4 / error8,
            unit="x",
            within=0.1,
        ),
    ]


def _loss(added: float) -> list[Check]:
    """Nothing to check on a CPU without a product in 8 bits; `cairn serve` says so there."""
    if math.isnan(added):
        return []
    return [
        Check(
            what=Words("loss added by int8", "int8 带来的损失增加"),
            predicted=0.05,
            measured=added,
            unit="nats",
            kind="at_most",
        )
    ]


def _of_a_model(bench: Workbench) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Of the shipped model in each form: its loss on a text; bits of a weight, and speed of one row."""
    import torch
    import torch.nn.functional as F

    from cairn.models.attend import Packed
    from cairn.models.linear.packed import Int4, Int8, Levels
    from cairn.models.runnable import open_model
    from cairn.serve.engine.cpu_weights import pack_weights

    opened = open_model("cairn-tiny")
    assert opened.tokenizer is not None
    model = opened.load("cpu", "float32").model
    ids = torch.tensor(opened.tokenizer.encode(TEXT))
    attend = Packed([len(ids)])
    losses = {}
    for form in ("float", "int8", "int4"):
        bench.step(f"cairn-tiny with {form} weights")
        usable = form != "int4" or Int4.obstacle(256, 256) is None
        if form == "int8" and Int8.obstacle(256, 256) is not None:
            usable = False
        with torch.inference_mode():
            pack_weights(model, form if usable else "float", 32.0)  # type: ignore[arg-type]
            logits_TV = model.logits(model(ids, attend.positions_T(), attend))
        losses[form] = float(F.cross_entropy(logits_TV[:-1], ids[1:])) if usable else math.nan
    bits, speed = {"int8": 8 + 32 / COLUMNS, "int4": math.nan}, {"int8": math.nan, "int4": math.nan}
    weight_NK, x_1K, none = (
        torch.randn(2048, 2048),
        torch.randn(1, 2048),
        torch.zeros(0, dtype=torch.long),
    )
    plain = bench.time(F.linear, [(x_1K, weight_NK)], device="cpu", budget_ms=100).median_s
    if Int8.obstacle(2048, 2048) is None:
        packed8 = Int8(weight_NK, none)
        speed["int8"] = (
            plain / bench.time(packed8.product, [(x_1K,)], device="cpu", budget_ms=100).median_s
        )
    if Int4.obstacle(2048, 2048) is None:
        packed4 = Int4(Levels(weight_NK), none)
        bits["int4"] = 8 * (packed4.packed.nbytes + packed4.apart_SN.nbytes) / weight_NK.numel()
        speed["int4"] = (
            plain / bench.time(packed4.product, [(x_1K,)], device="cpu", budget_ms=100).median_s
        )
    return losses, bits, speed


LAB = described(__file__, run)
