"""What do 8 and 4 bits for a weight cost in accuracy, and how much of that does GPTQ win back?

    levels between -m and m of a row (int8), or between low and high of a group of 32 (int4)
    rounding is off by up to half a step, evenly: mean square error = step^2 / 12

So the error is known before anything is rounded. The loss of a trained model says whether it matters, and rounding its
columns one after another, each making up for those before it, says how much of it has to be.
"""

import math
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.compress.quality import Quality
    from cairn.models.quantized.rounding import QuantizationGrid
    from cairn.models.transformer import Transformer

ROWS, COLUMNS, GROUP = 1024, 1024, 32


def uniform_error(span: float, levels: int) -> float:
    """Root mean square of the rounding error of `levels` even steps over `span`."""
    return span / levels / math.sqrt(12)


@one_thread()
def run(bench: Workbench) -> Outcome:
    import torch

    from cairn.models.quantized.rounding import QuantizationGrid

    weight_NK = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    bench.step("rounding a matrix")
    int8, int4 = (
        QuantizationGrid("int8", activations="token"),
        QuantizationGrid("int4", GROUP, symmetric=False),
    )
    errors = {"int8": _error(weight_NK, int8), "int4": _error(weight_NK, int4)}
    # Of n draws from a normal distribution, the largest magnitude and the range, by tables of order statistics.
    foreseen8 = uniform_error(2 * 3.45, 254)  # the largest of 1024: about 3.45 sigma
    # A group of 32 spans about 4.14 sigma; the two ends are rounded, too, because zero has a level.
    foreseen4 = uniform_error(4.14, 15)
    qualities = {
        name: _of_a_model(bench, name, grid) for name, grid in (("int8", int8), ("int4", int4))
    }
    ratio = _gptq_over_nearest(bench, int4)
    bits = {"int8": 8 + 16 / COLUMNS, "int4": 4 + (16 + 4) / GROUP}
    rows = [["bfloat16", 16.0, 0.0, qualities["int8"].perplexity_before, 0.0]]
    rows += [
        [name, bits[name], errors[name], quality.perplexity, quality.kl]
        for name, quality in qualities.items()
    ]
    return Outcome(
        checks=[
            *_rounding(foreseen8, errors["int8"], foreseen4, errors["int4"]),
            *_cost(qualities["int8"], ratio),
        ],
        table=Table(
            columns=[
                Words("weights", "权重"),
                Words("bits of a weight, scales included", "每权重比特数（含 scale）"),
                Words("rounding error, sigma", "舍入误差（sigma）"),
                Words("perplexity of cairn-tiny", "cairn-tiny 的困惑度"),
                Words("KL from the original, nats", "与原模型的 KL（nats）"),
            ],
            rows=rows,
        ),
        notes=[
            Words(
                "int8 rounds activations as well, each token by its own range (W8A8). `cairn quantize` does the "
                "same to any model, layer by layer, and writes a checkpoint.",
                "int8 同时按 token 舍入激活（W8A8）。`cairn quantize` 对任意模型逐层做同样的事并写出 checkpoint。",
            )
        ],
    )


def _error(weight_NK: "Tensor", grid: "QuantizationGrid") -> float:
    from cairn.models.quantized.rounding import fake_quantized

    return float((fake_quantized(weight_NK, grid) - weight_NK).pow(2).mean().sqrt())


def _rounding(foreseen8: float, error8: float, foreseen4: float, error4: float) -> list[Check]:
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


def _cost(quality: "Quality", ratio: float) -> list[Check]:
    return [
        Check(
            what=Words("perplexity added by int8", "int8 带来的困惑度增加"),
            predicted=0.02,
            measured=quality.added,
            unit="share",
            kind="at_most",
        ),
        Check(
            what=Words(
                "error of the output with GPTQ over round to nearest, int4",
                "int4：GPTQ 与就近舍入的输出误差之比",
            ),
            predicted=0.9,
            measured=ratio,
            unit="x",
            kind="at_most",
        ),
    ]


def _text() -> "tuple[Transformer, Tensor]":
    """The shipped model, and windows of the shipped text."""
    from cairn.compress.calibration import token_ids, windows
    from cairn.models.runnable import open_model

    opened = open_model("cairn-tiny")
    assert opened.tokenizer is not None
    ids = token_ids(None, opened.tokenizer, opened.spec.vocab)
    return opened.load("cpu", "float32").model, windows(ids, 128, "the labs")[:4]


def _of_a_model(bench: Workbench, name: str, grid: "QuantizationGrid") -> "Quality":
    """What rounding all layers of the shipped model to nearest does to its predictions."""
    import torch

    from cairn.compress.quality import Reference
    from cairn.compress.quantize import QuantizeSettings, quantize_model

    bench.step(f"cairn-tiny in {name}")
    model, windows_BL = _text()
    reference = Reference(model, windows_BL)
    quantize_model(model, windows_BL[:1], grid, QuantizeSettings(method="rtn"), torch.bfloat16)
    return reference.compare(model)


def _gptq_over_nearest(bench: Workbench, grid: "QuantizationGrid") -> float:
    """The worst matrix of the first layer: how much less of its output is lost."""
    import torch

    from cairn.compress.gptq import gptq
    from cairn.compress.layer_by_layer import walk
    from cairn.models.quantized.planes import dequantized
    from cairn.models.quantized.rounding import fake_quantized

    bench.step("GPTQ of the first layer")
    model, windows_BL = _text()
    first = next(walk(model, windows_BL, hessian=True))
    ratios = []
    for matrix, inputs in first.sites:
        w_NK, x_MK = matrix.read().float(), inputs.sample_MK
        made = gptq(w_NK, inputs.hessian_KK, grid, torch.bfloat16, matrix.name)
        lost = [
            (x_MK @ (w - w_NK).t()).norm() for w in (dequantized(made), fake_quantized(w_NK, grid))
        ]
        ratios.append(float(lost[0] / lost[1]))
    return max(ratios)


LAB = described(__file__, run)
