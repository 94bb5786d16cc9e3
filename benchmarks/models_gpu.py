"""Does the model compute on a GPU what `transformers` computes, and how fast does the plain generator run?

    python benchmarks/models_gpu.py --shapes qwen3-0.6b qwen3-8b --out benchmarks/h200/models.json

For each shape: random bf16 weights, exported as a Hugging Face checkpoint, loaded by us and by `transformers`. Packed
documents go through ours, each document alone through the reference, in bf16 and in float32; the float32 reference
says which of the two bf16 results is nearer. Then the plain generator decodes, beside the limit of one pass over the
weights per token at the copy bandwidth measured in the same run.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from cairn.bench.record import add_arguments, record
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.generate import GenerateSampling, Generation
from cairn.models.layers import ModelBuild
from cairn.models.presets import preset
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model

DOCUMENTS = [700, 1, 1024, 323]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    add_arguments(parser)
    options = parser.parse_args()
    bandwidth = copy_bandwidth()
    results = {"copy_bytes_per_s": bandwidth, "shapes": {}}
    for shape in options.shapes:
        with tempfile.TemporaryDirectory() as folder:
            results["shapes"][shape] = measure(shape, Path(folder) / "checkpoint", bandwidth)
        print(shape, results["shapes"][shape], file=sys.stderr)
    record(results, options)


def copy_bandwidth() -> float:
    from cairn.hw.measure_device import copy_rate

    return copy_rate("cuda", size_bytes=2**31, budget_ms=200).value


def measure(shape: str, folder: Path, bandwidth: float) -> dict[str, Any]:
    spec = preset(shape)
    began = time.perf_counter()
    source = random_model(spec, ModelBuild("cuda", torch.bfloat16, fused=True))
    torch.cuda.synchronize()
    random_s = time.perf_counter() - began
    export(source, folder)
    del source
    model, load_s = load(folder)
    result: dict[str, Any] = {
        "parameters": spec.parameters(),
        "random_weights_s": random_s,
        "load_s": load_s,
        "load_bytes_per_s": spec.weight_bytes() / load_s,
        "decode": decode(model, bandwidth),
    }
    documents = [torch.randint(0, spec.vocab, (n,), device="cuda") for n in DOCUMENTS]
    ours_TV = packed_logits(model, documents)
    del model
    theirs_TV = reference_logits(folder, documents, torch.bfloat16)
    exact_TV = reference_logits(folder, documents, torch.float32)
    result["relative_error"] = {
        "ours_bf16_to_reference_bf16": relative(ours_TV, theirs_TV),
        "ours_bf16_to_reference_fp32": relative(ours_TV, exact_TV),
        "reference_bf16_to_reference_fp32": relative(theirs_TV, exact_TV),
    }
    shutil.rmtree(folder)
    return result


def load(folder: Path) -> tuple[Transformer, float]:
    """The second load: files in the page cache, the device awake."""
    for _ in range(2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model = open_checkpoint(folder).load("cuda")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return model, seconds


@torch.inference_mode()
def packed_logits(model: Transformer, documents: list[torch.Tensor]) -> torch.Tensor:
    attend = PackedDocuments([len(d) for d in documents], "cuda")
    return model.logits(model(torch.cat(documents), attend.positions_T(), attend))


@torch.inference_mode()
def reference_logits(
    folder: Path, documents: list[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to("cuda").eval()
    return torch.cat([model(d[None]).logits[0] for d in documents])


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def decode(model: Transformer, bandwidth: float, prompt: int = 128, tokens: int = 128) -> dict:
    times = []
    for _ in range(2):  # the first warms up
        times = []
        for _ in Generation(model, list(range(prompt)), GenerateSampling(max_tokens=tokens), ()):
            times.append(time.perf_counter())
    rate = (len(times) - 1) / (times[-1] - times[0])
    limit = bandwidth / (model.spec.matmul_parameters() * 2)
    return {"tokens_per_s": rate, "limit_tokens_per_s": limit, "share": rate / limit}


if __name__ == "__main__":
    main()
