"""How long and how much memory does it take to load a checkpoint on the CPU?

    python benchmarks/load_checkpoint.py            a 0.6B-shaped bf16 checkpoint, 1.2 GB, written first

Against `safetensors.torch.load_file` in the same run. That call maps the file and reads nothing, and so do we; so each
is timed as it is, and again with every weight touched once, which is what using them costs. Each measurement is a
process of its own, so that resident memory means something. Ratios within one run; the files are in the page cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from cairn.bench.record import add_arguments, record
from cairn.models.export import export
from cairn.models.layers import ModelBuild
from cairn.models.presets import preset
from cairn.models.weights import random_model

MEASURE = """
import sys, time, json, resource
from pathlib import Path
import torch
from safetensors.torch import load_file
from cairn.models.checkpoint import open_checkpoint
from cairn.models.layers import Build
from cairn.models.transformer import Transformer
from cairn.models.weights import load

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

who, folder = sys.argv[1], Path(sys.argv[2])
before = resident()
began = time.perf_counter()
if who == "safetensors":
    tensors = list(load_file(folder / "model.safetensors").values())
else:
    checkpoint = open_checkpoint(folder)
    if who == "into a built model":
        model = Transformer(checkpoint.spec, Build("meta", torch.bfloat16))
        began = time.perf_counter()
        load(model, checkpoint.tensors, "cpu")
    else:
        model = checkpoint.load("cpu")
    tensors = list(model.parameters())
loaded = time.perf_counter()
checksum = sum(t.view(torch.int16).sum().item() for t in tensors)
touched = time.perf_counter()
print(json.dumps({"load_s": loaded - began, "touched_s": touched - began,
                  "resident": resident() - before, "checksum": checksum}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b")
    parser.add_argument("--rounds", type=int, default=5)
    add_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "checkpoint"
        export(random_model(preset(options.shape), ModelBuild("cpu", torch.bfloat16)), folder)
        size = os.path.getsize(folder / "model.safetensors")
        rounds = [
            {who: measure(who, folder) for who in ("safetensors", "into a built model", "ours")}
            for _ in range(options.rounds + 1)
        ][1:]
    if len({r[who]["checksum"] for r in rounds for who in r}) != 1:
        sys.exit("error: the loaded weights differ")
    record({"file_bytes": size} | summary(rounds, size), options)


def measure(who: str, folder: Path) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, who, str(folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def summary(rounds: list[dict[str, dict[str, float]]], size: int) -> dict[str, dict[str, float]]:
    def median(who: str, what: str) -> float:
        return statistics.median(r[who][what] for r in rounds)

    return {
        who: {
            "load_s": median(who, "load_s"),
            "touched_s": median(who, "touched_s"),
            "load_ratio": median(who, "load_s") / median("safetensors", "load_s"),
            "touched_ratio": median(who, "touched_s") / median("safetensors", "touched_s"),
            "resident_per_file_byte": median(who, "resident") / size,
        }
        for who in rounds[0]
    }


if __name__ == "__main__":
    main()
