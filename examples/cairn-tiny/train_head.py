"""An EAGLE-3 head for cairn-tiny: texts that the model writes itself, a head that learns to guess them, and a test.

    python examples/cairn-tiny/train_head.py --out cairn-tiny-eagle3
    cairn serve cairn-tiny --speculate cairn-tiny-eagle3

Any other model that `cairn serve` takes: --model, with --prompts, a file of JSON lines with `prompt` and `held_out`
(examples/smollm2/README.md). Without it prompts ask for stories, and held-out ones are about others than those learnt
from. What counts is the mean length of a run with three drafts, the token that is always drawn included.
"""

import argparse
import gc
import itertools
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cairn.models.eagle import EagleHead, save_head
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with
from cairn.train.eagle_head import (
    Rows,
    Schedule,
    draft_tokens,
    head_for,
    held_shares,
    train_head,
)

WHO = ("a fox", "a robot", "two sisters", "an old sailor", "a small dragon", "a baker", "a boy named Tom",
       "a girl named Mia", "a cat", "a king", "a frog", "a bus driver")  # fmt: skip
WHERE = ("in the forest", "at the sea", "in a big city", "on a farm", "in the snow", "at school", "on the moon",
         "in a garden")  # fmt: skip
WHAT = ("finds a key", "is lost", "makes a friend", "bakes a cake", "loses a hat", "builds a boat", "hears a noise",
        "learns to share", "plants a seed", "goes home")  # fmt: skip
HELD_OUT = ("a duck", "a teacher")  # nobody that is learnt from
DRAFTS = 3
PAGE = 64  # tokens
PACED = 12  # steps that tell how long one takes


def main() -> None:
    options = _options()
    # Nearly exact, and several times as fast on a GPU: the head reads rounded hidden states later, too.
    torch.set_float32_matmul_precision("high")
    opened = open_model(options.model)
    runnable = opened.load(options.device, "auto")
    began = time.time()
    learnt, held_out = prompts(opened, options)
    texts = write_texts(opened, runnable, learnt, options)
    apart = write_texts(opened, runnable, held_out[: options.measured], options)
    print(
        f"{len(texts.tokens_BN)} + {len(apart.tokens_BN)} texts in {time.time() - began:.1f} s",
        flush=True,
    )
    exact = opened.load(options.device, "float32")
    head, losses = learn(exact, texts, options)
    found: dict[str, Any] = {"options": {name: str(value) for name, value in vars(options).items()}}
    found |= {"losses": losses, "texts": checked(head, exact, apart, options)}
    save_head(head.to(torch.bfloat16), options.out, opened.spec.vocab, options.model)
    write_metrics(options, found)
    del exact, head
    gc.collect()
    for temperature in options.measured_at:
        name = f"temperature {temperature:g}"
        found[name] = measure(opened, runnable, held_out[: options.measured], options, temperature)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
        write_metrics(options, found)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="cairn-tiny")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default stories are asked for")
    parser.add_argument("--texts", type=int, default=4096)
    parser.add_argument("--length", type=int, default=192, help="tokens of a text and its prompt")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0], help="of the texts")
    parser.add_argument("--sequences", type=int, default=256, help="texts that are written at once")
    parser.add_argument("--draft-vocab", type=int, default=32000, help="tokens that the head knows")
    parser.add_argument("--rows", type=int, default=64, help="texts of a batch")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seconds", type=float, help="of training at most; fewer steps then")
    parser.add_argument("--measured", type=int, default=48, help="held-out prompts")
    parser.add_argument("--measured-at", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--metrics", type=Path, help="file for what was measured, as JSON")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def prompts(
    opened: OpenModel, options: argparse.Namespace
) -> tuple[list[list[int]], list[list[int]]]:
    """To learn from, and held out. They leave at least half of a text to the answer."""
    if options.prompts is None:
        learnt, held_out = stories(WHO), stories(HELD_OUT)
    else:
        lines = [json.loads(line) for line in options.prompts.read_text().splitlines()]
        learnt = [line["prompt"] for line in lines if not line["held_out"]]
        held_out = [line["prompt"] for line in lines if line["held_out"]]
    first, second = (
        [tokens for tokens in _encoded(opened, texts) if len(tokens) <= options.length // 2]
        for texts in (learnt, held_out)
    )
    return list(itertools.islice(itertools.cycle(first), options.texts)), second


def stories(who: tuple[str, ...]) -> list[str]:
    asked = list(itertools.product(who, WHERE, WHAT))
    random.Random(0).shuffle(asked)
    return [f"Tell me a story about {one} {where} who {what}." for one, where, what in asked]


def _encoded(opened: OpenModel, texts: list[str]) -> Iterator[list[int]]:
    assert opened.tokenizer is not None
    for text in texts:
        yield opened.tokenizer.encode_chat([{"role": "user", "content": text}])


def write_texts(
    opened: OpenModel, runnable: Runnable, asked: list[list[int]], options: argparse.Namespace
) -> Rows:
    """What the model answers, prompts included, padded to one length; the answers count."""
    engine = start_with(opened, runnable, _config(options, options.sequences)).engine
    requests = []
    for at, prompt in enumerate(asked):
        temperature = options.temperatures[at % len(options.temperatures)]
        most = options.length - len(prompt)
        params = SamplingParams(temperature=temperature, seed=at, max_tokens=most)
        requests.append(Request(at, prompt, params, eos_ids=opened.eos_ids))
        engine.add(requests[-1])
    engine.run()
    tokens_BN = torch.zeros(len(requests), options.length, dtype=torch.int64)
    counted_BN = torch.zeros_like(tokens_BN, dtype=torch.bool)
    for at, request in enumerate(requests):
        text = [*request.prompt, *request.outputs]
        tokens_BN[at, : len(text)] = torch.tensor(text)
        # A head guesses behind every token that was drawn but the last one.
        counted_BN[at, len(request.prompt) : len(text) - 1] = True
    return Rows(tokens_BN, counted_BN)


def _config(options: argparse.Namespace, rows: int, **more: Any) -> EngineConfig:
    tokens = options.length + PAGE  # drafts may stand behind the end of a text
    return EngineConfig(
        model=options.model,
        max_model_len=tokens,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        block_size=PAGE,
        num_gpu_blocks_override=1 + rows * (-(-tokens // PAGE) + 1),
        **more,
    )


def learn(
    runnable: Runnable, texts: Rows, options: argparse.Namespace
) -> tuple[EagleHead, list[dict[str, Any]]]:
    """With the losses of every hundredth step."""
    model, device = runnable.model.requires_grad_(False), runnable.device
    count = min(options.draft_vocab, model.spec.vocab)
    assert texts.counted_BN is not None
    written = texts.tokens_BN[texts.counted_BN]
    known_K = draft_tokens(written, model.spec.vocab, count)
    covered = torch.isin(written, known_K).float().mean().item()
    print(f"a head of {count} tokens knows {covered:.1%} of those that were written", flush=True)
    steps = options.steps
    if options.seconds:
        steps = min(
            steps,
            _steps_within(options.seconds, runnable, head_for(model, known_K), texts, options),
        )
    head, kept, began = head_for(model, known_K), [], time.time()
    schedule = Schedule(steps, options.lr)
    for step, losses in enumerate(
        train_head(head, model, batches(texts, device, options.rows), schedule)
    ):
        if step % 100 == 0 or step == steps - 1:
            kept.append({"step": step, "divergence": losses, "seconds": time.time() - began})
            said = " ".join(f"{loss:.3f}" for loss in losses)
            print(
                f"step {step:5d} of {steps}  divergence by pass {said}  {time.time() - began:.1f} s",
                flush=True,
            )
    return head, kept


def _steps_within(
    seconds: float, runnable: Runnable, head: EagleHead, texts: Rows, options: argparse.Namespace
) -> int:
    """By the pace of a few steps of a head that is then thrown away; the first ones are slower."""
    ends = []
    for _ in train_head(
        head, runnable.model, batches(texts, runnable.device, options.rows), Schedule(PACED)
    ):
        ends.append(time.time())
    step_s = (ends[-1] - ends[len(ends) // 2]) / (len(ends) - 1 - len(ends) // 2)
    return max(1, int(seconds / step_s))


def batches(texts: Rows, device: torch.device, rows: int) -> Iterator[Rows]:
    generator = torch.Generator().manual_seed(0)
    tokens_XN, counted_XN = texts
    assert counted_XN is not None
    while True:
        chosen = torch.randint(0, len(tokens_XN), (rows,), generator=generator)
        yield Rows(tokens_XN[chosen].to(device), counted_XN[chosen].to(device))


def checked(
    head: EagleHead, runnable: Runnable, apart: Rows, options: argparse.Namespace
) -> dict[str, Any]:
    """On texts that were held out, without an engine: shares of drafts that hold, by position."""
    tokens_XN, counted_XN = apart
    assert counted_XN is not None
    parts = zip(tokens_XN.split(options.rows), counted_XN.split(options.rows), strict=True)
    rows = [Rows(one.to(runnable.device), two.to(runnable.device)) for one, two in parts]
    shares = [held_shares(head, runnable.model, one, DRAFTS) for one in rows]
    means = [sum(of_pass) / len(shares) for of_pass in zip(*shares, strict=True)]
    found = {
        "length": round(1 + sum(means), 3),
        "held by position": [round(one, 3) for one in means],
    }
    print(f"held-out texts: {json.dumps(found)}", flush=True)
    return found


def measure(
    opened: OpenModel,
    runnable: Runnable,
    asked: list[list[int]],
    options: argparse.Namespace,
    temperature: float,
) -> dict[str, Any]:
    """Answers to held-out prompts with the head, and how many tokens a step brought."""
    config = _config(options, 16, speculate=str(options.out), draft_tokens=DRAFTS)
    engine = start_with(opened, runnable, config).engine
    for at, prompt in enumerate(asked):
        most = options.length - len(prompt)
        params = SamplingParams(temperature=temperature, seed=at, max_tokens=most)
        engine.add(Request(at, prompt, params, eos_ids=opened.eos_ids))
    engine.run()
    speculation = engine.scheduler.speculation
    assert speculation is not None
    counts = speculation.counts
    by_position = [round(held / counts.runs, 3) for held in counts.by_position]
    gc.collect()
    return {"length": round(counts.length, 3), "runs": counts.runs, "held by position": by_position}


def write_metrics(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """After every part, so that nothing is lost if a later one fails."""
    if options.metrics is not None:
        options.metrics.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
