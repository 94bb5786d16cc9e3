"""An EAGLE-3 head for cairn-tiny: texts that the model writes itself, a head that learns to guess them, and a test.

    python examples/cairn-tiny/train_head.py --out cairn-tiny-eagle3
    cairn serve cairn-tiny --speculate cairn-tiny-eagle3

Any other model that `cairn serve` takes: --model. Held-out prompts are about other things than those learnt from; what
counts is the mean length of a run with three drafts, the token that is always drawn included.
"""

import argparse
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from cairn.models.build import Build
from cairn.models.eagle import EagleHead, random_head, save_head
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.train.eagle_head import Schedule, train_head

WHO = ("a fox", "a robot", "two sisters", "an old sailor", "a small dragon", "a baker", "a boy named Tom",
       "a girl named Mia", "a cat", "a king", "a frog", "a bus driver")  # fmt: skip
WHERE = ("in the forest", "at the sea", "in a big city", "on a farm", "in the snow", "at school", "on the moon",
         "in a garden")  # fmt: skip
WHAT = ("finds a key", "is lost", "makes a friend", "bakes a cake", "loses a hat", "builds a boat", "hears a noise",
        "learns to share", "plants a seed", "goes home")  # fmt: skip
HELD_OUT = ("a duck", "a teacher")  # nobody that is learnt from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cairn-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--length", type=int, default=192, help="tokens of a text")
    parser.add_argument("--rows", type=int, default=64, help="texts of a batch")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    opened = open_model(options.model)
    runnable = opened.load(options.device, "auto")
    began = time.time()
    texts_XN = write_texts(opened, runnable, options)
    print(
        f"{len(texts_XN)} texts of {options.length} tokens in {time.time() - began:.1f} s",
        flush=True,
    )
    exact = opened.load(options.device, "float32")
    head = learn(exact, texts_XN, options)
    save_head(head.to(torch.bfloat16), options.out, opened.spec.vocab, options.model)
    for temperature in (0.0, 0.8):
        print(
            f"temperature {temperature}: {measure(opened, runnable, options, temperature)}",
            flush=True,
        )


def prompts(opened: OpenModel, who: tuple[str, ...], count: int) -> list[list[int]]:
    assert opened.tokenizer is not None
    asked = list(itertools.product(who, WHERE, WHAT))
    random.Random(0).shuffle(asked)
    texts = [f"Tell me a story about {one} {where} who {what}." for one, where, what in asked]
    return [
        opened.tokenizer.encode_chat([{"role": "user", "content": text}])
        for text in itertools.islice(itertools.cycle(texts), count)
    ]


def write_texts(opened: OpenModel, runnable: Runnable, options: argparse.Namespace) -> Tensor:
    """What the model says at temperature 1, prompts included, cut to one length."""
    config = EngineConfig(
        model=options.model,
        max_model_len=512,
        max_num_seqs=256,
        enable_prefix_caching=False,
        block_size=64,
        num_gpu_blocks_override=1 + 256 * 512 // 64,
    )
    engine = start_with(opened, runnable, config).engine
    requests = []
    for at, prompt in enumerate(prompts(opened, WHO, options.texts)):
        params = SamplingParams(
            temperature=1.0, seed=at, max_tokens=options.length, ignore_eos=True
        )
        requests.append(Request(at, prompt, params))
        engine.add(requests[-1])
    engine.run()
    texts = [[*request.prompt, *request.outputs][: options.length] for request in requests]
    return torch.tensor(texts)


def learn(runnable: Runnable, texts_XN: Tensor, options: argparse.Namespace) -> EagleHead:
    model, device = runnable.model.requires_grad_(False), runnable.device
    head = random_head(model.spec, Build(device, torch.float32))
    output = model.head or model.embedding
    if head.spec.draft_vocab == model.spec.vocab:  # a start that knows the tokens
        head.head.weight.copy_(output.weight)

    def batches() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(0)
        while True:
            chosen = torch.randint(0, len(texts_XN), (options.rows,), generator=generator)
            yield texts_XN[chosen].to(device)

    began = time.time()
    schedule = Schedule(steps=options.steps)
    for step, losses in enumerate(train_head(head, model, batches(), schedule)):
        if step % 100 == 0 or step == options.steps - 1:
            said = " ".join(f"{loss:.3f}" for loss in losses)
            print(
                f"step {step:5d}  divergence by pass {said}  {time.time() - began:.1f} s",
                flush=True,
            )
    return head


def measure(
    opened: OpenModel, runnable: Runnable, options: argparse.Namespace, temperature: float
) -> str:
    """Answers to held-out prompts with the head, and how many tokens a step brought."""
    config = EngineConfig(
        model=options.model,
        max_model_len=512,
        max_num_seqs=16,
        block_size=64,
        num_gpu_blocks_override=1 + 16 * 512 // 64,
        speculate=str(options.out),
        draft_tokens=3,
    )
    engine = start_with(opened, runnable, config).engine
    for at, prompt in enumerate(prompts(opened, HELD_OUT, 48)):
        params = SamplingParams(temperature=temperature, seed=at, max_tokens=128)
        engine.add(Request(at, prompt, params))
    engine.run()
    speculation = engine.scheduler.speculation
    assert speculation is not None
    counts = speculation.counts
    by_position = [round(held / counts.runs, 3) for held in counts.by_position]
    gc.collect()
    return json.dumps(
        {"length": round(counts.length, 3), "runs": counts.runs, "held by position": by_position}
    )


if __name__ == "__main__":
    main()
