"""What do 8 and 4 bits for a weight cost in accuracy, and what do they save?

    levels between -m and m of a row (int8), or between low and high of a group of 32 (int4)
    rounding is off by up to half a step, evenly: mean square error = step^2 / 12

So the error is known before anything is rounded. Bytes are exact; the loss of a trained model says whether it matters.
"""

import math

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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


LAB = Lab(
    name="quantisation",
    area="serving",
    title=Words("Weights in 8 and 4 bits", "8 比特与 4 比特权重"),
    hypothesis=Words(
        "The rounding error follows from range and levels alone (step / sqrt(12)): 0.0078 sigma for int8 rows of "
        "1024, 0.077 for int4 groups of 32, ten times as much. A trained model does not notice the first.",
        "舍入误差只由范围和级数决定（步长/√12）：1024 长的 int8 行约 0.0078σ，32 一组的 int4 约 0.077σ，相差十倍；"
        "训练好的模型察觉不到前者。",
    ),
    run=run,
    causes=(
        Words(
            "real weights are not normal: an outlier in a row widens its steps",
            "真实权重不是正态分布：行内离群值会放大步长",
        ),
        Words(
            "activations, which are rounded as well, add the larger part of the error",
            "激活也被舍入，误差的大部分来自它",
        ),
    ),
    code=(
        "cairn/models/packed_weights.py:Int8",
        "cairn/models/packed_weights.py:Levels",
        "cairn/serve/engine/cpu_weights.py:pack_weights",
    ),
    reading=(
        "LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale (2022)",
        "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers (2022)",
        "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration (2023)",
        "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models (2022)",
    ),
    questions=(
        Question(
            Words(
                "Why do groups of 32 or 128 help int4 so much?",
                "为什么分组（32 或 128）对 int4 帮助很大？",
            ),
            Words(
                "The step is the range over 15: a group of 32 spans about 4.1 sigma, a row of 4096 about 7.3, and "
                "one outlier spoils only its group. Price: a scale per group, half a bit of a weight for 32 in "
                "bf16.",
                "步长 = 范围/15：32 一组的范围约 4.1σ，4096 一行约 7.3σ，而且离群值只影响自己那组。代价是每组一个 "
                "scale，bf16、32 一组约多 0.5 比特。",
            ),
        ),
        Question(
            Words(
                "Why is quantising activations harder than weights?", "为什么量化激活比量化权重难？"
            ),
            Words(
                "They are not known beforehand, and a few channels are 20 to 100 times larger than the rest in "
                "every token. SmoothQuant moves that factor into the weights; LLM.int8 keeps those channels in "
                "floating point.",
                "激活事先未知，且少数通道在每个 token 上都比其余大 20 到 100 倍。SmoothQuant 把这个倍数移到权重里；"
                "LLM.int8 让这些通道保持浮点。",
            ),
        ),
        Question(
            Words(
                "When does int4 make decode faster, and when not?",
                "int4 什么时候能加快 decode，什么时候不能？",
            ),
            Words(
                "Where reading weights is the bound (small batch): up to the ratio of bytes, about 3.5x against "
                "bf16. At large batch the arithmetic decides, and unpacking costs extra.",
                "读权重是瓶颈时（小批量）：最多按字节比加速，相对 bf16 约 3.5 倍。大批量时由算力决定，"
                "解包反而有额外开销。",
            ),
        ),
    ),
    seconds=5.0,
)
