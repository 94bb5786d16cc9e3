"""How long from `python` to the first token of a model on local disk?

    python benchmarks/first_token.py --shape qwen3-8b --out benchmarks/h200/first_token.json

Random weights are exported as a Hugging Face checkpoint; then fresh processes load it through `LLM` and ask for one
token of a prompt of 128. The first of them may compile kernels and reads the file for the first time since it was
written; the last has all of that behind it ("warm"). The clock starts before the interpreter does.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from cairn.bench.record import add_arguments, record
from cairn.models.export import export
from cairn.models.layers import ModelBuild
from cairn.models.presets import preset
from cairn.models.weights import random_model

ASK = """
import sys, time
from cairn import LLM, SamplingParams
imported = time.time()
llm = LLM(sys.argv[1], device=sys.argv[2], load_in_advance=False)
made = time.time()
(answer,) = llm.generate([list(range(100, 228))], SamplingParams(max_tokens=1, ignore_eos=True))
assert len(answer.outputs[0].token_ids) == 1
print(imported, made, time.time(), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="where the checkpoint goes for the while")
    add_arguments(parser)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpoint = Path(folder) / "model"
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        model = random_model(preset(options.shape), ModelBuild(device, dtype))
        export(model, checkpoint)
        write_tokenizer(checkpoint, model.spec.vocab)
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
        starts = [ask(checkpoint, device) for _ in range(options.starts)]
    record({"shape": options.shape, "device": device, "starts": starts}, options)


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """As many words as the model has tokens: loading it takes as long as loading a real one."""
    words = {f"t{number}": number for number in range(vocabulary)}
    Tokenizer(WordLevel(words, unk_token="t0")).save(str(folder / "tokenizer.json"))


def ask(checkpoint: Path, device: str) -> dict[str, Any]:
    """Seconds of one start, by part."""
    began = time.time()
    command = [sys.executable, "-c", ASK, str(checkpoint), device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    imported, made, answered = map(float, done.stdout.split())
    return {
        "first_token_s": answered - began,
        "import_s": imported - began,
        "load_and_make_s": made - imported,
        "answer_s": answered - made,
    }


if __name__ == "__main__":
    main()
