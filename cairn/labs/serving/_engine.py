"""The engine of this project with a small model, for labs: same scheduler, pages and loop as in a server.

    engine = small_engine(spec, rows=8)        random weights, float32, on the CPU whatever else this machine has
    requests = [ask(0, prompt, outputs), ...]
    took = drain(engine, requests)             seconds until all of them have ended

Labs compare what the engine does with a prediction; so the CPU's own rates are needed where it computes (`host_rates`).
"""

import random
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cairn.labs.workbench import Workbench
from cairn.models.spec import ModelSpec

if TYPE_CHECKING:
    from cairn.serve.engine.loop import Engine
    from cairn.serve.engine.request import Request

# Small enough for seconds on two cores, large enough that its weights do not fit a cache.
SMALL = ModelSpec(
    family="llama",
    vocab=2048,
    hidden=384,
    layers=6,
    heads=6,
    kv_heads=2,
    head_dim=64,
    intermediate=1024,
    context=4096,
    tied=True,
)
# Steps of about a millisecond, for labs that count steps.
TINY = ModelSpec(
    family="llama",
    vocab=512,
    hidden=64,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=32,
    intermediate=128,
    context=4096,
    tied=True,
)


class Rates(NamedTuple):
    """What the CPU sustains in float32, now."""

    flops_per_s: float
    bytes_per_s: float


def small_engine(spec: ModelSpec, **options: object) -> "Engine":
    """An engine over random weights; `options` are fields of EngineConfig."""
    from cairn.models.runnable import OpenModel
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.start import start_with

    opened = OpenModel("random", spec, None, (), None)
    asked: dict[str, object] = {
        "model": "random:tiny",
        "device": "cpu",
        "weights": "float",
        "max_num_batched_tokens": 4096,
        "num_gpu_blocks_override": 1024,
    }
    config = EngineConfig(**(asked | options))  # type: ignore[arg-type]
    return start_with(opened, opened.load("cpu", "float32"), config, sole=True).engine


def ask(number: int, prompt: Sequence[int], outputs: int, **options: object) -> "Request":
    """A greedy request that ends after exactly so many tokens."""
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.sampling_params import SamplingParams

    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    return Request(number, list(prompt), params, **options)  # type: ignore[arg-type]


def words(count: int, vocab: int, seed: int) -> list[int]:
    """So many made-up tokens."""
    draw = random.Random(seed)
    return [draw.randrange(vocab) for _ in range(count)]


def drain(engine: "Engine", requests: Sequence["Request"] = ()) -> float:
    """Put them in, run until nothing is left, and say how long that took."""
    for request in requests:
        engine.add(request)
    began = time.perf_counter()
    engine.run()
    return time.perf_counter() - began


def host_rates(bench: Workbench, rows: int = 768) -> Rates:
    """Of this CPU at this moment, in tenths of a second: others may be using it, so a minute ago says little.

    Of several runs the quick ones: products of so many rows with matrices that take turns, as those of a model do, for
    the arithmetic, and of one row with a matrix that no cache holds for memory.
    """
    import torch

    x = torch.randn(rows, 768)
    weights = [(x, torch.randn(768, 768)) for _ in range(20)]
    timing = bench.time(torch.nn.functional.linear, weights, device="cpu", at_least=20)
    flops = 2 * rows * 768**2 / timing.p10_s
    weight, row = torch.randn(4096, 4096), torch.randn(1, 4096)
    seconds = bench.time(torch.nn.functional.linear, [(row, weight)], device="cpu").p10_s
    return Rates(flops, weight.nbytes / seconds)


def better(one: Rates, other: Rates) -> Rates:
    """Of two looks at the same CPU: whatever else ran meanwhile can only have made one of them slower."""
    return Rates(max(one.flops_per_s, other.flops_per_s), max(one.bytes_per_s, other.bytes_per_s))
