"""What adapters and reinforcement learning cost on this machine.

    python benchmarks/posttraining.py decode --model qwen3-8b --out benchmarks/h200/posttraining.json
    python benchmarks/posttraining.py train --model qwen3-0.6b qwen3-1.7b qwen3-8b --out ...
    python benchmarks/posttraining.py grpo --model qwen3-0.6b --out ...

    decode   a decode step with 1, 8, 32 and 64 adapters on all linear maps beside one without; loading an adapter
    train    tokens per second of an adapter of rank 16, whole steps
    grpo     one step: 128 prompts x 8 answers, 128 tokens in, 256 out; mismatch of trainer and engine

Weights are random. Each measurement replaces its own part of the file.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from cairn.bench.record import add_arguments, record
from cairn.bench.train import Setup, measure

RANK = 16


def decode(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with

    rows, prompt, steps = options.rows, options.prompt, options.steps
    opened = open_model(f"random:{options.model[0]}")
    runnable = opened.load(options.device, options.dtype)
    config = EngineConfig(
        model="random",
        device=options.device,
        dtype=options.dtype,
        max_model_len=prompt + 3 * steps + 64,
        max_num_seqs=rows,
        load_in_advance=False,
    )
    engine = start_with(opened, runnable, config).engine
    found: dict[str, Any] = {
        "model": options.model[0],
        "rows": rows,
        "context": prompt,
        "rank": RANK,
    }
    none = _step_ms(engine, rows, prompt, steps, [0])
    found["none_ms"] = none
    loads = [_load(engine, runnable.model, n) for n in range(1, max(options.adapters) + 1)]
    found["load_ms"] = [one for one in loads if one is not None]
    print(f"{none:.3f} ms a step without adapters; loads {found['load_ms']} ms", flush=True)
    for count in options.adapters:
        took = _step_ms(engine, rows, prompt, steps, list(range(1, count + 1)))
        found[f"adapters_{count}"] = {"ms": took, "slower": took / none - 1}
        print(
            f"{count} adapters: {took:.3f} ms a step, {100 * (took / none - 1):.1f}% slower",
            flush=True,
        )
    found["none_again_ms"] = _step_ms(engine, rows, prompt, steps, [0])
    return found


def _load(engine: Any, model: Any, number: int) -> float | None:
    """Milliseconds until a folder's adapter can be asked for; None: it was made on the device."""
    from cairn.models.adapter.folder import write_adapter
    from cairn.models.adapter.merge import _detach

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        folder = Path(root) / "a"
        if number <= 3:  # from the page cache, as a server does
            _attach_random(model)
            write_adapter(model, _spec(), folder)
            for part in list(model.modules()):
                if getattr(part, "adapter", None) is not None:
                    _detach(part)
            _wait()
            began = time.perf_counter()
            loaded = engine.read_adapter(str(folder))
            engine.load_adapter(number, loaded)
            _wait()
            return 1e3 * (time.perf_counter() - began)
    from cairn.models.adapter.attach import addends
    from cairn.serve.engine.adapters import LoadedAdapter

    made = addends(model, model.spec, _spec(), _build(model))
    for one in made.values():
        for parameter in one.lora.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        one.lora.settle()
    engine.load_adapter(number, LoadedAdapter(RANK, {one.home: one.lora for one in made.values()}))
    return None


def _spec() -> Any:
    from cairn.models.adapter.spec import AdapterSpec

    return AdapterSpec(rank=RANK, alpha=32.0)


def _build(model: Any) -> Any:
    return model.build._replace(device=str(model.embedding.weight.device))


def _attach_random(model: Any) -> None:
    from cairn.models.adapter.attach import attach

    for lora in attach(model, model.spec, _spec(), _build(model)):
        for parameter in lora.parameters():
            torch.nn.init.normal_(parameter, std=0.02)


def _step_ms(engine: Any, rows: int, prompt: int, steps: int, adapters: list[int]) -> float:
    """The median decode step of requests that use these adapters in turns; prompts are computed once for all."""
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True)
    vocab = engine.runner.model.spec.vocab
    requests = [
        Request(n, [(7 * n + 13 * at) % (vocab - 1) for at in range(prompt)], params,
                adapter=adapters[n % len(adapters)])
        for n in range(rows)
    ]  # fmt: skip
    for request in requests:  # one identity: pages of another adapter are as good for timing
        engine.add(request)
    times, last = [], time.perf_counter()
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) >= rows:
            times.append(now - last)
        last = now
    half = times[len(times) // 4 :]
    return 1e3 * statistics.median(half)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for model in options.model:
        setup = Setup(
            model=model,
            lora=RANK,
            dtype="bf16" if options.dtype == "bfloat16" else "fp32",
            seq=options.seq,
            batch=options.batch,
            microbatch=options.microbatch or options.batch,
            memory_gib=options.memory_gib,
            device=options.device,
            steps=options.steps,
            rounds=1,
            warmup=2,
        )
        row = measure(setup)
        found[model] = msgspec.to_builtins(row)
        print(
            f"{model} r{RANK}: {row.tokens_per_s} tokens/s, {row.peak_gib} GiB, {row.failure}",
            flush=True,
        )
    return found


def grpo(options: argparse.Namespace) -> dict[str, Any]:
    from cairn.align.config import Algorithm, Align, Rollout
    from cairn.align.objective import PolicyObjective
    from cairn.align.policy import Policy
    from cairn.align.rollout import batches_of, document
    from cairn.train.config import Data, Model, Optim, Precision
    from cairn.train.corpus import Corpus
    from cairn.train.data.tokenizer_trainer import train_tokenizer
    from cairn.train.prepare import assemble, shape_of
    from cairn.train.random_tokens import RandomTokens
    from cairn.train.step import train_step

    group, most, prompt = 8, options.answer, options.prompt
    answers = options.prompts * group
    config = Align(
        steps=8,
        model=Model(preset=options.model[0]),
        data=Data(sequence=prompt + most, sequences=answers, microbatch=options.microbatch or 32),
        optim=Optim(lr=1e-6, weight_decay=0.0),
        precision=Precision(
            kind="bfloat16" if options.dtype == "bfloat16" else "float32", recompute="none"
        ),
        rollout=Rollout(group=group, max_tokens=most),
        algorithm=Algorithm(kind="grpo"),
        device=options.device,
    )
    spec = shape_of(config.model)
    tokenizer = train_tokenizer(["a b c"], 512, fewer=True)
    corpus = Corpus(RandomTokens(spec.vocab, 8, 0), tokenizer, spec.vocab)
    prepared = assemble(config, torch.device(options.device), corpus, spec, None)
    state = prepared.state
    state.loss = objective = PolicyObjective(spec, config, prepared.fused)
    policy = Policy(state, tokenizer, options.rows, prompt + most)
    policy.eos_ids = ()
    found: list[dict[str, float]] = []
    for turn in range(options.turns):
        policy.updated(turn)
        prompts = [
            [(31 * turn + 7 * p + 13 * at) % (spec.vocab - 1) for at in range(prompt)]
            for p in range(options.prompts)
        ]
        _wait()
        began = time.perf_counter()
        each = [one for one in prompts for _ in range(group)]
        sampled = policy.sample(each, most, list(range(answers)))
        rolled = time.perf_counter()
        documents = [
            document(asked, one.tokens, one.logp, 0.5 - (n % 2), 1 / len(one.tokens))
            for n, (asked, one) in enumerate(zip(each, sampled, strict=True))
        ]
        batches = batches_of(documents, config.data.microbatch, 0, 0)
        objective.watch.on = True
        train_step(state, [batch.to(state.device) for batch in batches])
        _wait()
        done = time.perf_counter()
        mean, largest = objective.watch.read()
        row = {"rollouts_s": rolled - began, "train_s": done - rolled, "step_s": done - began,
               "mismatch": mean, "largest": largest}  # fmt: skip
        print({name: round(value, 5) for name, value in row.items()}, flush=True)
        found.append(row)
    return {
        "model": options.model[0],
        "answers": answers,
        "prompt": prompt,
        "answer": most,
        "turns": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("what", choices=["decode", "train", "grpo"])
    parser.add_argument("--model", nargs="+", default=["qwen3-8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=0)
    parser.add_argument("--memory-gib", type=float, default=0.0)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.out and options.out.is_file():
        results = msgspec.json.decode(options.out.read_bytes())["results"]
    results[options.what] = {"decode": decode, "train": train, "grpo": grpo}[options.what](options)
    record(results, options)


if __name__ == "__main__":
    main()
