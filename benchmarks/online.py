"""The highest rate of requests that one engine holds, in this process: no server, no client, no network.

    python benchmarks/online.py --shape qwen3-8b --rate 24 34 --out benchmarks/h200/online.json
    python benchmarks/online.py --shape qwen3-8b --promise --out benchmarks/h200/online.json

    Poisson arrivals --> engine --> first token, last token          one rate
    a rate that holds, a rate that is broken --> the middle          the search (`cairn.bench.load_search`)

A rate holds if the 99th percentile of the time to the first token, counted from the arrival, and that of the time for
each further token keep `--slo`. `--promise` asks the simulator of `cairn serve --slo` for its limits and measures the
rate that it promises. `cairn bench serve --find-rate` does the same over HTTP.
"""

import argparse
import itertools
import random
import time
from typing import Any, NamedTuple

import numpy as np

from cairn.bench import arrivals, load_search
from cairn.bench.engine_run import TEMPERATURE, serve
from cairn.bench.load_search import Tried
from cairn.bench.record import add_arguments, record
from cairn.bench.workload_request import WorkloadRequest
from cairn.cli.kernels_build import SERVER
from cairn.core.garbage_collection import quiet_collector
from cairn.models.runnable import OpenModel, open_model
from cairn.plan import slo as planned
from cairn.plan.device import device as planned_device
from cairn.plan.serve_cost import Served
from cairn.plan.slo import Chosen, Lengths, Slo
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.start import start_with

WARM_ROWS = 32  # requests at once before the first rate


class Seen(NamedTuple):
    """One request, in seconds of this process's clock."""

    arrived: float
    first: float
    last: float
    tokens: int

    def ttft(self) -> float:
        return self.first - self.arrived

    def tpot(self) -> float:
        return (self.last - self.first) / max(1, self.tokens - 1)


def main() -> None:
    options = parsed()
    slo, lengths = planned.parse_slo(options.slo), planned.parse_lengths(options.lengths)
    opened = open_model(f"random:{options.shape}")
    chosen = promise(options, opened, slo, lengths) if options.promise else None
    engine = started(options, opened, lengths, chosen)
    draw = random.Random(0)
    serve(engine, [prompt(draw, lengths, opened.spec.vocab) for _ in range(WARM_ROWS)])
    rows: list[dict[str, Any]] = []
    tried: list[Tried] = []
    while (rate := next_rate(options, tried, chosen)) is not None:
        seen = offered(engine, rate, options.seconds, lengths, opened.spec.vocab)
        row = summary(options.shape, rate, seen, slo)
        tried.append(Tried(rate, row["holds"]))
        rows.append(row | ({"promised": chosen.rate} if chosen else {}))
        print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
        record({"slo": options.slo, "lengths": options.lengths, "rows": rows}, options, show=False)
    print(load_search.verdict(tried))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen3-8b", help="a preset, with random weights")
    parser.add_argument(
        "--rate",
        type=float,
        nargs="+",
        default=[24.0, 34.0],
        help="LOW HIGH of the search, in requests a second; one is where it starts",
    )
    parser.add_argument("--resolution", type=float, default=0.03, help="of the search, as a share")
    parser.add_argument("--seconds", type=float, default=8.0, help="in which requests arrive")
    parser.add_argument("--slo", default="ttft=500ms,tpot=25ms")
    parser.add_argument("--lengths", default="1024/128", help="tokens in and out")
    parser.add_argument("--promise", action="store_true", help="measure the promise of `--slo`")
    parser.add_argument(
        "--step-ms", type=float, default=SERVER["step_ms"], help="as of `cairn serve`"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="as of `cairn serve`")
    parser.add_argument("--planned-for", default="h200", help="with --promise: the planner's name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    add_arguments(parser)
    return parser.parse_args()


def promise(options: argparse.Namespace, opened: OpenModel, slo: Slo, lengths: Lengths) -> Chosen:
    served = Served(spec=opened.spec, device=planned_device(options.planned_for))
    chosen = planned.choose(served, slo, lengths)
    print(*chosen.why, sep="\n", flush=True)
    return chosen


def started(
    options: argparse.Namespace, opened: OpenModel, lengths: Lengths, chosen: Chosen | None
) -> Engine:
    config = EngineConfig(
        model=f"random:{options.shape}",
        device=options.device,
        dtype=options.dtype,
        max_model_len=lengths.input_tokens + lengths.output_tokens,
        max_num_seqs=chosen.max_num_seqs if chosen else options.max_num_seqs,
        max_num_batched_tokens=SERVER["max_num_batched_tokens"]
        if options.device != "cpu"
        else None,
        step_ms=chosen.step_ms if chosen else options.step_ms,
        load_in_advance=True,
    )
    return start_with(opened, opened.load(options.device, options.dtype), config).engine


def next_rate(
    options: argparse.Namespace, tried: list[Tried], chosen: Chosen | None
) -> float | None:
    """With a promise, that rate and 5% more; otherwise what the search asks for."""
    if chosen is not None:
        return [*(round(share * chosen.rate, 2) for share in (1.0, 1.05)), None][len(tried)]
    low, high = (*options.rate, None)[:2]
    return load_search.next_rate(tried, low, high, options.resolution)


def offered(
    engine: Engine, rate: float, seconds: float, lengths: Lengths, vocab: int
) -> list[Seen]:
    """Requests come at their own times, whatever the engine does; until the last has its last token."""
    draw = random.Random(1)
    due = arrivals.times("poisson", rate, draw, duration_s=seconds) or [0.0]
    asked = [prompt(draw, lengths, vocab) for _ in due]
    engine.scheduler.blocks.reset()
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    sent = 0
    with quiet_collector():
        began = time.perf_counter()
        while sent < len(due) or engine.has_work:
            now = time.perf_counter() - began
            while sent < len(due) and due[sent] <= now:
                engine.add(request(sent, asked[sent]))
                sent += 1
            if not engine.has_work:
                time.sleep(max(0.0, due[sent] - now))
                continue
            for output in engine.step():
                if output.tokens:
                    last[int(output.request.id)] = time.perf_counter() - began
                    first.setdefault(int(output.request.id), last[int(output.request.id)])
    if len(first) < len(due):
        raise SystemExit(
            f"{len(due) - len(first)} of {len(due)} requests at {rate:g}/s have no answer"
        )
    return [Seen(due[at], first[at], last[at], lengths.output_tokens) for at in range(len(due))]


def request(number: int, one: WorkloadRequest) -> Request:
    params = SamplingParams(max_tokens=one.output, ignore_eos=True, temperature=TEMPERATURE)
    return Request(number, one.prompt, params)


def prompt(draw: random.Random, lengths: Lengths, vocab: int) -> WorkloadRequest:
    return WorkloadRequest(
        draw.choices(range(vocab), k=lengths.input_tokens), lengths.output_tokens
    )


def summary(shape: str, rate: float, seen: list[Seen], slo: Slo) -> dict[str, Any]:
    parts = {"ttft": [one.ttft() for one in seen], "tpot": [one.tpot() for one in seen]}
    row: dict[str, Any] = {"shape": shape, "rate": rate, "requests": len(seen)}
    for (name, values), share in itertools.product(parts.items(), (50, 99)):
        found = float(np.percentile(values, share, method="higher"))  # one that was measured
        row[f"{name}_p{share}_ms"] = round(1e3 * found, 2)
    row["holds"] = row["ttft_p99_ms"] <= 1e3 * slo.ttft_s and row["tpot_p99_ms"] <= 1e3 * slo.tpot_s
    row["output_tokens_per_s"] = round(
        sum(one.tokens for one in seen) / max(one.last for one in seen)
    )
    return row


if __name__ == "__main__":
    main()
