"""What does the host's tier of the KV cache cost, and what does it save?

    python benchmarks/tiers.py --model random:qwen3-8b --prefix 8192 --out benchmarks/h200/tiers.json

One model, two engines: without a tier and with one, each with room for a few prompts only. Prompts are new each time
(what the tier costs) or had left the device (what it saves); answers behind a loaded prefix have to be those behind the
same prefix on the device. Runs on a CPU, too, with a small model.
"""

import argparse
import statistics
import time

import torch

from cairn.bench.record import add_arguments, record
from cairn.models.runnable import open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

TAIL = 64  # tokens behind the prefix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="random:qwen3-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prefix", type=int, default=8192)
    parser.add_argument("--output", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", default="8GiB")
    parser.add_argument("--kv-cache-dtype", default="auto")
    add_arguments(parser)
    given = parser.parse_args()
    opened = open_model(given.model)
    runnable = opened.load(given.device, "auto")
    page = 64 if runnable.model.embedding.weight.is_cuda else 16
    room = 3 * -(-(given.prefix + TAIL + given.output) // page)

    def engine(host: str | None) -> Engine:
        config = EngineConfig(
            model=given.model,
            device=given.device,
            num_gpu_blocks_override=room,
            kv_offload_host=host,
            kv_cache_dtype=given.kv_cache_dtype,
        )
        return start_with(opened, runnable, config).engine

    plain, tiered = engine(None), engine(given.host)
    bench = Bench(given.prefix, given.output, opened.spec.vocab)
    for one in (plain, tiered):  # kernels and graphs
        bench.fresh(one)
        bench.again(one)
    costs = [(bench.fresh(plain), bench.fresh(tiered)) for _ in range(given.rounds)]
    back = [bench.leave_and_return(tiered, room * page) for _ in range(given.rounds)]
    tiers = tiered.tiers
    assert tiers is not None
    found = {
        "model": given.model,
        "prefix_tokens": given.prefix,
        "kv_cache_dtype": given.kv_cache_dtype,
        "host_gb_per_s": tiers.rate / 1e9,
        "computed_ttft_ms": milliseconds([one[0].ttft for one in costs]),
        "computed_with_tier_ttft_ms": milliseconds([one[1].ttft for one in costs]),
        "loaded_ttft_ms": milliseconds([one.ttft for one in back]),
        "loaded_tokens": [one.loaded for one in back],
        "same_tokens": all(one.same for one in back),
        "fresh_ms_without": milliseconds([one[0].whole for one in costs]),
        "fresh_ms_with": milliseconds([one[1].whole for one in costs]),
        "cost_of_tier": statistics.median(b.whole / a.whole for a, b in costs),
        "stored_pages": tiers.counts.stored_pages,
        "skipped_pages": tiers.counts.skipped_pages,
    }
    record(found, given)


class Timed:
    def __init__(self, request: Request, whole: float) -> None:
        ledger = request.ledger
        self.ttft, self.whole = ledger.first_token - ledger.arrived, whole
        self.loaded, self.tokens, self.same = ledger.host_tokens, request.outputs, True


class Bench:
    def __init__(self, prefix: int, output: int, vocabulary: int) -> None:
        self.prefix, self.output, self.vocabulary = prefix, output, vocabulary
        self._count = 0
        self._last: list[int] = []

    def fresh(self, engine: Engine) -> Timed:
        """A prompt that nobody has seen."""
        self._count += 1
        seeded = torch.Generator().manual_seed(self._count)
        drawn = torch.randint(1, self.vocabulary, (self.prefix + TAIL,), generator=seeded)
        self._last = drawn.tolist()
        return self._run(engine, self._last)

    def again(self, engine: Engine) -> Timed:
        return self._run(engine, self._last)

    def leave_and_return(self, engine: Engine, room: int) -> Timed:
        self.fresh(engine)
        here, kept = self.again(engine), self._last
        for _ in range(room // self.prefix + 1):
            self.fresh(engine)
        back = self._run(engine, kept)
        back.same = back.tokens == here.tokens
        return back

    def _run(self, engine: Engine, prompt: list[int]) -> Timed:
        params = SamplingParams(temperature=0.0, max_tokens=self.output, ignore_eos=True)
        request = Request(f"{time.monotonic_ns()}", prompt, params)
        began = time.monotonic()
        engine.add(request)
        engine.run()
        return Timed(request, time.monotonic() - began)


def milliseconds(seconds: list[float]) -> float:
    """The median."""
    return round(1e3 * statistics.median(seconds), 3)


if __name__ == "__main__":
    main()
