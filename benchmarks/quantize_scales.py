"""What a product loses by its weights and by its activations, before and after the methods that help each of them.

    python benchmarks/quantize_scales.py smollm2-135m-instruct --judge wikitext2_test.txt --scheme fp8 --layers 0 12

Calibrates with the texts of the labs; errors are |error| / |output| on the judged text. Weights: round to nearest, GPTQ
at the scale of the largest weight with damping 0.01, GPTQ as `cairn quantize` has it. Activations: as they are, and
divided by SmoothQuant's scale of the strength with the least error.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from cairn.compress import gptq as gptq_module
from cairn.compress.calibration import read_text
from cairn.compress.gptq import damping_for, gptq
from cairn.compress.layer_by_layer import MatrixSite, matrix_widths, walk
from cairn.compress.open_model import open_whole
from cairn.compress.smoothquant import STRENGTHS
from cairn.compress.statistics import bounded_rows
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.rounding import (
    QuantizationGrid,
    fitted,
    rounded,
    rounded_activations,
    steps_of,
)

NAMES = ("rtn", "gptq, before", "gptq", "activations", "smoothed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--judge", type=Path, required=True)
    parser.add_argument("--scheme", default="fp8")
    parser.add_argument("--layers", type=int, nargs="*", default=[0])
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    whole = open_whole(args.model, "cpu", "auto")
    grid, _ = fitted(args.scheme, matrix_widths(whole.model), None)
    texts = read_text(
        None, args.judge, whole.tokenizer, whole.model.spec.vocab,
        samples=args.samples, length=args.length, held_out=args.samples,
    )  # fmt: skip
    print(f"{'matrix':32}" + "".join(f"{name:>16}" for name in NAMES))
    lines = []
    calibrated, judged = (walk(whole.model, part, True, 4) for part in texts[:2])
    for known, other in zip(calibrated, judged, strict=True):
        if known.number in args.layers:
            for seen, unseen in zip(known.sites, other.sites, strict=True):
                lines.append(errors(seen, unseen, grid, whole.stored))
                print(f"{seen.matrix.name:32}" + "".join(f"{e:16.5f}" for e in lines[-1]))
        if known.number >= max(args.layers):
            break
    print(f"{'mean':32}" + "".join(f"{float(e):16.5f}" for e in torch.tensor(lines).mean(0)))


@torch.no_grad()
def errors(
    seen: MatrixSite, unseen: MatrixSite, grid: QuantizationGrid, stored: torch.dtype
) -> list[float]:
    w_NK, calibrated_KK = seen.matrix.read().float(), seen.inputs.hessian_KK
    judged_KK = unseen.inputs.hessian_KK

    def lost(planes: Planes) -> float:
        error_NK = dequantized(planes) - w_NK
        return (norm(error_NK, judged_KK) / norm(w_NK, judged_KK)) ** 0.5

    damping = damping_for(seen.inputs.rows, len(calibrated_KK))
    searched = gptq(w_NK, calibrated_KK, grid, stored, damping=damping)
    largest = at_largest(lambda: gptq(w_NK, calibrated_KK, grid, stored))
    return [
        lost(rounded(w_NK, grid, stored)),
        lost(largest),
        lost(searched),
        *activation_errors(seen, unseen, w_NK, grid),
    ]


def norm(w_NK: Tensor, hessian_KK: Tensor) -> float:
    return float(((w_NK @ hessian_KK) * w_NK).sum())


def at_largest(make: Callable[[], Planes]) -> Planes:
    """With the scales that GPTQ had before they were searched."""
    search = gptq_module.best_steps
    gptq_module.best_steps = lambda w_NK, importance_K, *more: steps_of(w_NK, *more)
    try:
        return make()
    finally:
        gptq_module.best_steps = search


def activation_errors(
    seen: MatrixSite, unseen: MatrixSite, w_NK: Tensor, grid: QuantizationGrid
) -> tuple[float, float]:
    x_MK = bounded_rows(unseen.inputs.sample_MK.float())
    wanted_MN = x_MK @ w_NK.t()

    def lost(scale_K: Tensor) -> float:
        made_MK = rounded_activations(x_MK / scale_K, grid) * scale_K
        return float((made_MK @ w_NK.t() - wanted_MN).norm() / wanted_MN.norm())

    most_x_K = seen.inputs.max_abs_K.clamp(min=1e-5)
    most_w_K = w_NK.abs().amax(0).clamp(min=1e-5)
    smoothed = [lost(most_x_K**a / most_w_K ** (1 - a)) for a in STRENGTHS]
    return lost(torch.ones_like(most_x_K)), min(smoothed)


if __name__ == "__main__":
    main()
