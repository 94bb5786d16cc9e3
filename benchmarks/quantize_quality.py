"""What quantising costs a real model: perplexity and the error of every matrix, for each scheme and method.

    python benchmarks/quantize_quality.py --judge wikitext2_test.txt --out benchmarks/cpu/quantize.json

Calibrates with the texts of the labs, judges with the given text, and writes one record per pair. `--pairs
fp8/gptq/0.005` leaves in 16 bits what is expected to add more than 0.5% (`cairn quantize --keep auto`). A model of
stories is judged by stories: "\n\n".join(story(1, n) for n in range(80)) of `cairn.train.data.stories`.
"""

import argparse
import shutil
import tempfile
from itertools import product
from pathlib import Path

from cairn.bench.record import add_arguments
from cairn.bench.record import record as write_record
from cairn.compress.quantize_report import QuantizeResult
from cairn.compress.quantize_run import QuantizeJob, quantize

PAIRS = [
    ("fp8", "rtn"),
    ("fp8-block", "rtn"),
    ("w8a8", "rtn"),
    ("w8a8", "smoothquant"),
    ("w4a16", "rtn"),
    ("w4a16", "awq"),
    ("w4a16", "gptq"),
    ("nvfp4", "gptq"),
    ("mxfp4", "gptq"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=["smollm2-135m-instruct"])
    parser.add_argument("--judge", type=Path)
    parser.add_argument("--samples", type=int, default=0)
    parser.add_argument("--length", type=int, default=0)
    parser.add_argument("--judged", type=int, default=8)
    parser.add_argument("--pairs", nargs="*", default=[f"{a}/{b}" for a, b in PAIRS])
    add_arguments(parser)
    args = parser.parse_args()
    records = []
    for model, pair in product(args.models, args.pairs):
        scheme, method, *most_added = pair.split("/")
        folder = Path(tempfile.mkdtemp()) / "made"
        job = QuantizeJob(
            model=model,
            scheme=scheme,
            method=method,
            most_added=float(most_added[0]) if most_added else None,
            out=folder,
            judge=args.judge,
            samples=args.samples,
            length=args.length,
            judged=args.judged,
        )
        result = quantize(job)
        shutil.rmtree(folder.parent)
        records.append(record(result))
        print(f"{model} {pair}: {result.quality.words()}", flush=True)
    write_record(records, args)


def record(result: QuantizeResult) -> dict[str, object]:
    errors = result.errors
    return {
        "model": Path(result.model).name,
        "scheme": result.scheme,
        "method": result.method,
        "group": result.group,
        "bytes": result.bytes,
        "seconds": round(result.seconds, 1),
        "calibration_tokens": result.calibration_tokens,
        "judged_tokens": result.quality.tokens,
        "perplexity_before": round(result.quality.perplexity_before, 4),
        "perplexity": round(result.quality.perplexity, 4),
        "added": round(result.quality.added, 5),
        "kl": round(result.quality.kl, 5),
        "same_top": round(result.quality.same_top, 4),
        "matrices": len(errors),
        "kept_in_16_bits": len(result.kept),
        "expected_nats": round(sum(one.nats for one in result.costs if not one.kept), 5),
        "mean_error": round(sum(one.error for one in errors) / len(errors), 5),
        "mean_error_of_nearest": round(sum(one.nearest for one in errors) / len(errors), 5),
        "matrices_worse_than_nearest": sum(one.error > one.nearest * 1.0001 for one in errors),
    }


if __name__ == "__main__":
    main()
