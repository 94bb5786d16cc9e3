"""What a request waits for when its adapter is not on the device: more are registered than `--max-loras` keeps there.

    python benchmarks/many_adapters.py --model cairn-tiny --device cpu --registered 1000 --slots 8
    python benchmarks/many_adapters.py --model random:qwen3-0.6b --registered 1000 --slots 32 --out ...

Requests come one after another, as fast as `--rows` at a time are answered. Each takes an adapter by lot: first of as
many as lie on the device, then of all. Time to the first token counts from the request's coming. All adapters have the
same numbers under names of their own; identities differ, so no page of another one is found.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from posttraining import adapter_folder, wait_for_device

from cairn.bench.record import add_arguments, record
from cairn.models.runnable import open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--model", default="cairn-tiny")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--registered", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=8)
    options = parser.parse_args()
    engine, load_ms = loaded(options)
    waits(
        engine, options, options.slots, options.requests // 4
    )  # what is captured or compiled is so
    found = {
        name: waits(engine, options, among, options.requests)
        for name, among in (("on_device", options.slots), ("all", options.registered))
    }
    shown = {name: value for name, value in vars(options).items() if name not in ("out", "commit")}
    results = {
        **shown,
        "load_ms": spread(load_ms),
        **{f"first_token_{k}_ms": spread(v) for k, v in found.items()},
    }
    results["p99_more_ms"] = (
        results["first_token_all_ms"]["p99"] - results["first_token_on_device_ms"]["p99"]
    )
    record({"many_adapters": results}, options)


def loaded(options: argparse.Namespace) -> tuple[Any, list[float]]:
    """An engine with all adapters registered, and how long each took."""
    opened = open_model(options.model)
    runnable = opened.load(options.device, options.dtype)
    config = EngineConfig(model=options.model, device=options.device, dtype=options.dtype, max_loras=options.slots,
                          max_num_seqs=options.rows, max_model_len=options.prompt + options.answer + 8)  # fmt: skip
    engine = start_with(opened, runnable, config).engine
    engine.runner.adapters.warm_up()  # as a server does before it listens
    took = []
    with adapter_folder(engine.runner.model) as folder:
        for number in range(1, options.registered + 1):
            began = time.perf_counter()
            engine.load_adapter(number, engine.read_adapter(folder))
            wait_for_device()
            took.append(1e3 * (time.perf_counter() - began))
    return engine, took


def waits(engine: Any, options: argparse.Namespace, among: int, count: int) -> list[float]:
    """Milliseconds from each request to its first token."""
    dice, vocab = random.Random(among), engine.runner.model.spec.vocab
    params = SamplingParams(temperature=0.0, max_tokens=options.answer, ignore_eos=True)
    came: dict[Request, float] = {}
    found: list[float] = []
    going = 0
    while going or len(came) < count:
        while going < options.rows and len(came) < count:
            tokens = [dice.randrange(vocab - 1) for _ in range(options.prompt)]
            number = dice.randint(1, among)
            request = Request(len(came), tokens, params, adapter=number, identity=b"%d" % number)
            came[request] = time.perf_counter()
            engine.add(request)
            going += 1
        for output in engine.step():
            if len(output.request.outputs) == len(output.tokens):
                found.append(1e3 * (time.perf_counter() - came[output.request]))
            going -= bool(output.finished)
    return found


def spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p99": ordered[int(0.99 * (len(ordered) - 1))],
        "first": values[0],
        "longest": ordered[-1],
    }


if __name__ == "__main__":
    main()
