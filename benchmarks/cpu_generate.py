"""How fast is the engine on a CPU, beside `transformers` generate in the same run?

    python benchmarks/cpu_generate.py --shape tiny
    python benchmarks/cpu_generate.py --shape qwen3-0.6b --outputs 8 40 --prompts 8 80

mixed: 32 requests of different lengths, which `generate` takes as one padded batch that runs until the longest is
done. uniform: 8 requests of one length, where padding costs nothing. The same random weights, float32, greedy; the
tokens that were asked for, per second, best of the rounds, which take turns. On a shared machine only the ratio means
something. Tokens are compared, too: a faster engine that answers something else would be no engine.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cairn.bench.record import add_arguments, record
from cairn.models.export import export
from cairn.models.layers import ModelBuild
from cairn.models.presets import preset
from cairn.models.runnable import OpenModel, Runnable
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

PAD = 0


class Wish(NamedTuple):
    prompt: list[int]
    outputs: int


Answers = list[list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs=2, default=(16, 256), help="tokens, from to")
    parser.add_argument("--outputs", type=int, nargs=2, default=(16, 128), help="tokens, from to")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = random_model(preset(options.shape), ModelBuild("cpu", torch.float32)).eval()
    with tempfile.TemporaryDirectory() as folder:
        export(model, Path(folder))
        peer = load_peer(Path(folder))
        results = {
            name: compare(model, peer, wishes, options.rounds)
            for name, wishes in workloads(model.spec.vocab, options).items()
        }
    record({"shape": options.shape, "threads": options.threads} | results, options)


def workloads(vocabulary: int, options: argparse.Namespace) -> dict[str, list[Wish]]:
    chance = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [chance.randrange(1, vocabulary) for _ in range(length)]

    mixed = [
        Wish(prompt(chance.randint(*options.prompts)), chance.randint(*options.outputs))
        for _ in range(32)
    ]
    length, outputs = sum(options.prompts) // 2, sum(options.outputs) // 2
    return {"mixed": mixed, "uniform": [Wish(prompt(length), outputs) for _ in range(8)]}


def compare(model: Transformer, peer: Any, wishes: list[Wish], rounds: int) -> dict[str, float]:
    best: dict[str, float] = {}
    answers: dict[str, Answers] = {}
    ways: dict[str, Callable[[], Answers]] = {
        "cairn": lambda: ours(model, wishes),
        "transformers": lambda: theirs(peer, wishes),
    }
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            answers[name] = way()
            best[name] = min(best.get(name, 1e9), time.perf_counter() - began)
    tokens = sum(wish.outputs for wish in wishes)
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    rates = {f"{name}_tokens_per_s": tokens / seconds for name, seconds in best.items()}
    return rates | {
        "ratio": best["transformers"] / best["cairn"],
        "same_answers": same / len(wishes),
    }


def ours(model: Transformer, wishes: list[Wish]) -> Answers:
    longest = max(len(wish.prompt) + wish.outputs for wish in wishes)
    config = EngineConfig(
        model="random", device="cpu", max_model_len=longest, max_num_seqs=len(wishes)
    )
    opened = OpenModel("random", model.spec, None, (), None)
    engine = start_with(opened, Runnable("random", model, "random weights"), config).engine
    requests = [
        Request(i, wish.prompt, SamplingParams(temperature=0.0, max_tokens=wish.outputs))
        for i, wish in enumerate(wishes)
    ]
    for request in requests:
        engine.add(request)
    engine.run()
    return [request.outputs for request in requests]


def load_peer(folder: Path) -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def theirs(peer: Any, wishes: list[Wish]) -> Answers:
    """One batch, padded on the left, until the longest answer is there."""
    longest = max(len(wish.prompt) for wish in wishes)
    rows = [[PAD] * (longest - len(wish.prompt)) + wish.prompt for wish in wishes]
    mask = [[0] * (longest - len(wish.prompt)) + [1] * len(wish.prompt) for wish in wishes]
    found = peer.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=None,
        max_new_tokens=max(wish.outputs for wish in wishes),
    )
    return [
        row[longest : longest + wish.outputs].tolist()
        for row, wish in zip(found, wishes, strict=True)
    ]


if __name__ == "__main__":
    main()
