"""How many texts a second become vectors, and how near is that to the limit of the machine?

    python benchmarks/embeddings.py --model all-minilm-l6-v2 --rival --out benchmarks/cpu/embeddings.json
    python benchmarks/embeddings.py --shape bge-base --out benchmarks/h200/embeddings.json

`--rival` runs sentence-transformers on the same texts, in turns with ours, and compares the vectors. `--shape` has
random weights. The floor is the FLOPs of the model over the matrix rate of `machine.json`, where there is one.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from cairn.bench.record import add_arguments, record
from cairn.models.build import ModelBuild
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.model import Encoder
from cairn.models.encoder.pool import pooled
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.hub import resolve
from cairn.models.spec import ModelSpec
from cairn.models.weights import fill_random

WORDS = ["river", "stone", "bread", "music", "code", "winter", "engine", "garden", "paper"]
SHAPES = {"bge-base": (30522, 768, 12, 12, 3072), "bge-large": (30522, 1024, 24, 16, 4096)}
CONTEXT = 512


def lengths_of(count: int, seed: int = 0) -> list[int]:
    """Words of texts: log-normal around 60 with a long tail, as prompts of chats are."""
    draw = random.Random(seed)
    return [min(max(int(draw.lognormvariate(4.1, 0.9)), 3), 300) for _ in range(count)]


def texts_of(count: int, words: int | None = None) -> list[str]:
    """Of lengths as above, or all of so many words."""
    draw = random.Random(1)
    lengths = lengths_of(count) if words is None else [words] * count
    return [" ".join(draw.choices(WORDS, k=length)) for length in lengths]


class Took(NamedTuple):
    seconds: float
    cpu_s: float  # of all threads; a busy machine lengthens it less


def in_turns(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, Took]:
    """What each took, the median of several rounds in which they take turns."""
    took: dict[str, list[Took]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            began, computed = time.perf_counter(), time.process_time()
            run()
            took[name].append(Took(time.perf_counter() - began, time.process_time() - computed))
    return {name: Took(*map(statistics.median, zip(*of, strict=True))) for name, of in took.items()}


def compare(options: argparse.Namespace) -> dict[str, object]:
    """A real model through `LLM.embed`, beside sentence-transformers where that is asked for."""
    from cairn import LLM

    texts = texts_of(options.texts, options.words)
    with LLM(options.model, device=options.device, dtype=options.dtype) as llm:
        ours = np.array(llm.embed(texts, truncate=True))
        runs: dict[str, Callable[[], object]] = {"cairn": lambda: llm.embed(texts, truncate=True)}
        found: dict[str, object] = {"model": options.model, "dtype": options.dtype}
        found["texts"] = len(texts)
        if options.rival:
            from sentence_transformers import SentenceTransformer

            rival = SentenceTransformer(str(resolve(options.model)), device=options.device)
            theirs = rival.encode(texts, show_progress_bar=False)
            found["least_cosine"] = float((ours * theirs).sum(-1).min())
            runs["sentence-transformers"] = lambda: rival.encode(texts, show_progress_bar=False)
        took = in_turns(runs, options.rounds)
        found["texts_per_s"] = {name: len(texts) / of.seconds for name, of in took.items()}
        found["texts_per_cpu_s"] = {name: len(texts) / of.cpu_s for name, of in took.items()}
        if options.rival:
            ours_took, theirs_took = took["cairn"], took["sentence-transformers"]
            found["speed_up"] = theirs_took.seconds / ours_took.seconds
            found["speed_up_by_cpu_s"] = theirs_took.cpu_s / ours_took.cpu_s
        return found


def random_shape(options: argparse.Namespace) -> dict[str, object]:
    """The model alone on packed batches, beside the floor of its FLOPs."""
    vocab, hidden, layers, heads, intermediate = SHAPES[options.shape]
    shape = ModelSpec(
        family="bert",
        vocab=vocab,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=intermediate,
        context=CONTEXT,
        tied=True,
        norm="layer",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        gated=False,
        activation="gelu",
        positions="learned",
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Encoder(EncoderSpec(shape, token_types=2), ModelBuild("meta", dtype, fused=True))
    fill_random(model, model.slots(), device, 0)
    lengths = [min(length * 5 // 4, CONTEXT) for length in lengths_of(options.texts)]
    batches = packed(lengths, options.batch_tokens)
    inputs = [torch.randint(0, vocab, (sum(batch),), device=device) for batch in batches]

    def run() -> None:
        with torch.inference_mode():
            for batch, tokens_T in zip(batches, inputs, strict=True):
                attend = Bidirectional(batch, device)
                hidden_TD = model(tokens_T, attend.positions_T(), attend)
                made_BD = pooled(hidden_TD, batch, ["cls"] * len(batch))
            made_BD.cpu()

    run()
    seconds = in_turns({"cairn": run}, options.rounds)["cairn"].seconds
    flops = float(sum(encoder_flops(shape, length) for length in lengths))
    return {
        "shape": options.shape,
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(),
        "texts": len(lengths),
        "tokens": sum(lengths),
        "texts_per_s": len(lengths) / seconds,
        "tokens_per_s": sum(lengths) / seconds,
        "tflops": flops / seconds / 1e12,
        "share_of_685_tflops": flops / seconds / 685e12,
    }


def packed(lengths: list[int], budget: int) -> list[list[int]]:
    """Batches in the order of arrival, each sorted by length."""
    batches: list[list[int]] = [[]]
    for length in lengths:
        if batches[-1] and sum(batches[-1]) + length > budget:
            batches.append([])
        batches[-1].append(length)
    return [sorted(batch) for batch in batches]


def encoder_flops(shape: ModelSpec, length: int) -> int:
    """Of one text: every token is multiplied with every matrix, and sees every other token."""
    matrices = shape.matmul_parameters() - shape.vocab * shape.hidden
    pairs = 4 * shape.heads * shape.head_dim * shape.layers * length * length
    return 2 * matrices * length + pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="all-minilm-l6-v2")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of ours; the rival's is float32")
    parser.add_argument("--rival", action="store_true")
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--words", type=int, help="of each text, in place of the lengths of chats")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-tokens", type=int, default=32768)
    add_arguments(parser)
    options = parser.parse_args()
    record(random_shape(options) if options.shape else compare(options), options)


if __name__ == "__main__":
    main()
