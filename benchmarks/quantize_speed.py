"""How long GPTQ takes for a model of some shape: a few of its layers are quantised, the rest is multiplied out.

    python benchmarks/quantize_speed.py --preset qwen3-8b --layers 3 --samples 512 --length 2048

Random weights and random tokens: the work does not depend on them.
"""

import argparse
import json
import time
from itertools import pairwise

import msgspec
import torch

from cairn.compress.quantize import QuantizeSettings, quantize_model
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import default_device
from cairn.models.presets import preset
from cairn.models.quantized.rounding import fitted
from cairn.models.weights import random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--scheme", default="w4a16")
    parser.add_argument("--method", default="gptq")
    args = parser.parse_args()
    device = default_device()
    whole = preset(args.preset)
    spec = msgspec.structs.replace(whole, layers=args.layers, windows=whole.windows[: args.layers])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = random_model(spec, ModelBuild(device, dtype, fused=device == "cuda"))
    windows_BL = torch.randint(0, spec.vocab, (args.samples, args.length), device=device)
    grid, _ = fitted(args.scheme, [spec.hidden, spec.intermediate, spec.heads * spec.head_dim])
    marks = [time.perf_counter()]

    def advance(words: str) -> None:
        if device == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())

    quantize_model(
        model, windows_BL, grid, QuantizeSettings(method=args.method), torch.bfloat16, advance
    )
    seconds = [after - before for before, after in pairwise(marks)]
    later = seconds[1:] or seconds
    layer = sum(later) / len(later)
    record = {
        "preset": args.preset,
        "scheme": args.scheme,
        "method": args.method,
        "tokens": args.samples * args.length,
        "seconds_a_layer": round(layer, 2),
        "layers_measured": len(seconds),
        "predicted_minutes": round(layer * whole.layers / 60, 2),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1)
        if device == "cuda"
        else None,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
