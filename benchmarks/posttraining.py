"""What adapters and reinforcement learning cost on this machine.

    python benchmarks/posttraining.py decode --model qwen3-8b --out benchmarks/h200/posttraining.json
    python benchmarks/posttraining.py train --model qwen3-8b qwen3-1.7b qwen3-0.6b --out ...
    python benchmarks/posttraining.py train --model qwen3-8b --microbatch 2 --base float nf4 --out ...
    python benchmarks/posttraining.py grpo --model qwen3-0.6b --out ...
    python benchmarks/posttraining.py grpo --model qwen3-0.6b --consistent --out ...

    decode   a decode step with 1, 8, 32 and 64 adapters on all maps, in turns with one without; loading an adapter
    train    tokens per second of an adapter of rank 16, whole steps; --base nf4: over weights in 4 bits
    grpo     one step: 128 prompts x 8 answers, 128 tokens in, 256 out; mismatch of trainer and engine; with
             --consistent of the engine's own scores, which has to be 0: the first step of a round

Weights are random. Each figure is written as soon as it is known, in its own part of the file; the others stay.
`--layers 2` tries a part with fewer layers, and compiles the same kernels.
"""

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch

from cairn.bench.record import add_arguments, record, require_commit
from cairn.bench.train import TrainSetup, measure
from cairn.core.garbage_collection import keep_what_is_loaded

RANK = 16
FROM_FOLDERS = 4  # adapters that are read from a folder; the others are made on the device
Keep = Callable[[str, Any], None]  # writes a figure into this part of the file


def decode(options: argparse.Namespace, keep: Keep) -> None:
    """A whole part anew: its figures are compared with each other."""
    rows, prompt, steps = options.rows, options.prompt, options.steps
    model = options.model[0]
    about = {"model": model, "rows": rows, "context": prompt, "rank": RANK, "room": options.room}
    for name, value in about.items():
        keep(name, value)
    engine = _engine(options)
    keep("none_ms", none := _step_ms(engine, rows, prompt, steps, [0]))
    print(f"{none:.3f} ms a step before there are adapters", flush=True)
    folders = [_load(engine, number) for number in range(1, max(options.adapters) + 1)]
    keep("load_ms", [one for one in folders if one is not None])
    print(f"loads {[one for one in folders if one is not None]}", flush=True)
    _with_adapters(engine, options, keep, "adapters")
    if options.room:  # the same engine once more, with a kernel that shrinks
        engine.runner.adapters.slots.columns = None
        engine.runner.adapters.slots.layouts += 1
        _with_adapters(engine, options, keep, "apart")
    keep("beside_a_load", _beside_a_load(engine, options))


def _with_adapters(engine: Any, options: argparse.Namespace, keep: Keep, name: str) -> None:
    """How much slower steps are than those without adapters before and after: clocks fall while a GPU grows warm."""

    def step_ms(numbers: list[int]) -> float:
        return _step_ms(engine, options.rows, options.prompt, options.steps, numbers)

    before = step_ms([0])
    for count in options.adapters:
        took, after = step_ms(list(range(1, count + 1))), step_ms([0])
        none, before = (before + after) / 2, after
        keep(f"{name}_{count}", {"ms": took, "none_ms": none, "slower": took / none - 1})
        print(
            f"{name} {count}: {took:.3f} ms beside {none:.3f}, {100 * (took / none - 1):.1f}% slower",
            flush=True,
        )


def _engine(options: argparse.Namespace) -> Any:
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.sizing import GPU_PAGE
    from cairn.serve.engine.start import start_with

    opened = open_model(f"random:{options.model[0]}")
    if options.layers:
        opened.spec = msgspec.structs.replace(opened.spec, layers=options.layers)
    runnable = opened.load(options.device, options.dtype)
    longest = options.prompt + 3 * options.steps + 64
    config = EngineConfig(
        model="random",
        device=options.device,
        dtype=options.dtype,
        max_model_len=longest,
        max_num_seqs=options.rows,
        num_gpu_blocks_override=options.rows * (longest // GPU_PAGE + 2),
        lora_room=options.room,
    )
    engine = start_with(opened, runnable, config).engine
    # As a server does before it listens.
    engine.runner.adapters.warm_up()
    keep_what_is_loaded()
    return engine


def _load(engine: Any, number: int) -> dict[str, float] | None:
    """Milliseconds until a folder's adapter can be asked for; None: it was made on the device."""
    from cairn.models.adapter.attach import addends
    from cairn.serve.engine.adapters import LoadedAdapter

    model = engine.runner.model
    if number <= FROM_FOLDERS:
        with adapter_folder(model) as folder:
            return _timed_load(engine, number, folder)
    made = addends(model, model.spec, _spec(), _build(model))
    for one in made.values():
        for parameter in one.lora.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        one.lora.settle()
    engine.load_adapter(number, LoadedAdapter(RANK, {one.home: one.lora for one in made.values()}))
    return None


def _timed_load(engine: Any, number: int, folder: str) -> dict[str, float]:
    wait_for_device()
    began = time.perf_counter()
    loaded = engine.read_adapter(folder)
    wait_for_device()
    read = time.perf_counter()
    engine.load_adapter(number, loaded)
    wait_for_device()
    done = time.perf_counter()
    return {
        "ms": 1e3 * (done - began),
        "read_ms": 1e3 * (read - began),
        "slot_ms": 1e3 * (done - read),
    }


@contextmanager
def adapter_folder(model: Any) -> Iterator[str]:
    """A folder with a random adapter, in the page cache."""
    from cairn.models.adapter.folder import write_adapter
    from cairn.models.adapter.merge import _detach

    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        _attach_random(model)
        write_adapter(model, _spec(), Path(root) / "a")
        for part in list(model.modules()):
            if getattr(part, "adapter", None) is not None:
                _detach(part)
        yield str(Path(root) / "a")


def _beside_a_load(engine: Any, options: argparse.Namespace) -> dict[str, float]:
    """What others wait for while an adapter is read on another thread and gets its slot between two steps."""
    number, read = max(options.adapters) + 1, []
    with adapter_folder(engine.runner.model) as folder:
        reader = threading.Thread(target=lambda: read.append(engine.read_adapter(folder)))

        def before(step: int) -> None:
            if step == options.steps // 2:
                reader.start()
            if read:
                engine.load_adapter(number, read.pop())

        times = _steps(engine, options.rows, options.prompt, 2 * options.steps, [0], before)
        reader.join()
    kept = sorted(times[len(times) // 8 :])
    found = {"median_ms": 1e3 * statistics.median(kept), "longest_ms": 1e3 * kept[-1]}
    print(f"a step beside a load: {found}", flush=True)
    return found


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
    times = _steps(engine, rows, prompt, steps, adapters)
    return 1e3 * statistics.median(times[len(times) // 4 :])


def _steps(
    engine: Any,
    rows: int,
    prompt: int,
    steps: int,
    adapters: list[int],
    before: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Seconds of each step in which all requests decode."""
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.6, max_tokens=steps, ignore_eos=True)
    vocab = engine.runner.model.spec.vocab
    for n in range(rows):  # one identity: pages of another adapter are as good for timing
        tokens = [(7 * n + 13 * at) % (vocab - 1) for at in range(prompt)]
        engine.add(Request(n, tokens, params, adapter=adapters[n % len(adapters)]))
    times, last = [], time.perf_counter()
    while engine.has_work:
        before(len(times))
        outputs = engine.step()
        now = time.perf_counter()
        if len(outputs) >= rows:
            times.append(now - last)
        last = now
    return times


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def train(options: argparse.Namespace, keep: Keep) -> None:
    for model, base in product(options.model, options.base):
        setup = TrainSetup(
            model=model,
            lora=RANK,
            base=base,
            layers=options.layers,
            dtype="bf16" if options.dtype == "bfloat16" else "fp32",
            seq=options.seq,
            batch=options.batch,
            microbatch=min(options.microbatch or options.batch, options.batch),
            memory_gib=options.memory_gib,
            recompute=options.recompute or "auto",
            offload=options.offload,
            device=options.device,
            steps=options.steps,
            rounds=1,
            warmup=options.warmup,
        )
        row = measure(setup)
        keep(f"{model} {base}", msgspec.to_builtins(row))
        print(
            f"{model} r{RANK} over {base}: {row.tokens_per_s} tokens/s, {row.peak_gib} GiB, "
            f"recompute {row.recompute}, {row.offloaded} layers offloaded, {row.failure or ''}",
            flush=True,
        )


def grpo(options: argparse.Namespace, keep: Keep) -> None:
    from cairn.align.objective import PolicyObjective
    from cairn.align.policy import Policy
    from cairn.train.corpus import Corpus
    from cairn.train.data.tokenizer_trainer import train_tokenizer
    from cairn.train.describe import shape_of
    from cairn.train.prepare import assemble
    from cairn.train.random_tokens import RandomTokens

    config = _recipe(options)
    spec = shape_of(config.model)
    tokenizer = train_tokenizer(["a b c"], 512, fewer=True)
    corpus = Corpus(RandomTokens(spec.vocab, 8, 0), tokenizer, spec.vocab)
    prepared = assemble(config, torch.device(options.device), corpus, spec, None)
    state = prepared.state
    state.loss = PolicyObjective(spec, config, prepared.fused)
    longest = options.prompt + options.answer
    policy = Policy(state, tokenizer, options.rows, longest, options.consistent)
    policy.eos_ids = ()
    name = f"{options.model[0]} lora {options.lora}" if options.lora else options.model[0]
    name += " consistent" if options.consistent else ""
    turns = []
    for turn in range(options.turns):
        turns.append(_grpo_step(options, state, policy, turn))
        print({key: round(value, 5) for key, value in turns[-1].items()}, flush=True)
        about = {
            "answers": config.data.sequences,
            "prompt": options.prompt,
            "answer": options.answer,
        }
        about |= {"rows": options.rows, "layers": options.layers, "shared": not options.unshared}
        keep(name, about | {"turns": turns})


def _recipe(options: argparse.Namespace) -> Any:
    from cairn.align.config import Algorithm, Align, Rollout
    from cairn.train.config import Adapter, Data, Model, Optim, Precision

    return Align(
        steps=8,
        model=Model(preset=options.model[0], layers=options.layers),
        data=Data(
            sequence=options.prompt + options.answer,
            sequences=options.prompts * options.group,
            microbatch=options.microbatch or 32,
        ),
        optim=Optim(lr=1e-6, weight_decay=0.0),
        precision=Precision(
            kind="bfloat16" if options.dtype == "bfloat16" else "float32",
            recompute=options.recompute or "none",
        ),
        adapter=Adapter(rank=options.lora),
        rollout=Rollout(
            group=options.group, max_tokens=options.answer, shared_prompts=not options.unshared
        ),
        algorithm=Algorithm(kind="grpo"),
        device=options.device,
    )


def _grpo_step(options: argparse.Namespace, state: Any, policy: Any, turn: int) -> dict[str, Any]:
    from cairn.align.consistent import scored
    from cairn.align.rollout import batches_of, document, shares_prompts
    from cairn.train.step import train_step

    wait_for_device()
    began = time.perf_counter()
    policy.updated(turn)
    fenced = time.perf_counter()
    prompts = [
        [(31 * turn + 7 * p + 13 * at) % (state.spec.vocab - 1) for at in range(options.prompt)]
        for p in range(options.prompts)
    ]
    each = [one for one in prompts for _ in range(options.group)]
    sampled = policy.sample(each, options.answer, list(range(len(each))))
    rolled = time.perf_counter()
    documents = [
        document(asked, one.tokens, one.logp, 0.5 - (n % 2), 1 / len(one.tokens))
        for n, (asked, one) in enumerate(zip(each, sampled, strict=True))
    ]
    if options.consistent:
        documents = scored(policy, documents, fresh=True)  # as the first step of a round
    scores = time.perf_counter()
    shared = shares_prompts(state.config, state.spec)
    batches = batches_of(documents, state.config.data.microbatch, 0, 0, shared)
    state.loss.watch.on = True
    train_step(state, [batch.to(state.device) for batch in batches])
    wait_for_device()
    done = time.perf_counter()
    mean, largest = state.loss.watch.read()
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    return {"fence_ms": 1e3 * (fenced - began), "rollouts_s": rolled - fenced,
            "score_s": scores - rolled, "train_s": done - scores, "step_s": done - began,
            "mismatch": mean, "largest": largest, "peak_gib": peak}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("what", choices=["decode", "train", "grpo"])
    parser.add_argument("--model", nargs="+", default=["qwen3-8b"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument(
        "--room", type=int, default=0, help="adapters whose A lies behind the weights"
    )
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--answer", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--unshared", action="store_true", help="prompts once for each answer")
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument(
        "--consistent", action="store_true", help="the engine scores what is learnt"
    )
    parser.add_argument("--base", nargs="+", default=["float"])
    parser.add_argument("--recompute", default="")
    parser.add_argument("--offload", action="store_true", help="activations may wait on the host")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=0)
    parser.add_argument("--memory-gib", type=float, default=0.0)
    options = parser.parse_args()
    if options.out:
        require_commit(options.commit)
    before: dict[str, Any] = {}
    if options.out and options.out.is_file():
        before = msgspec.json.decode(options.out.read_bytes())
    results = before.get("results", {})
    if options.what == "decode":
        results.pop("decode", None)

    def keep(name: str, value: Any) -> None:
        results.setdefault(options.what, {})[name] = value
        if options.out:
            record(results, options, before.get("command"), show=False)

    {"decode": decode, "train": train, "grpo": grpo}[options.what](options, keep)


if __name__ == "__main__":
    main()
