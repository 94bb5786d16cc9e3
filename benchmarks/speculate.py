"""What drafts are worth on one GPU, with random weights and acceptance dialled in.

    python benchmarks/speculate.py --out benchmarks/h200/speculate.json
    python benchmarks/speculate.py --shapes qwen3-0.6b --rows 1

    one row      256 tokens behind a prompt of 128: plain, k = 4 at a length of 3.0 (n-grams, then an EAGLE-3 head with
                 random weights), always wrong with k = 4 and with k chosen by the controller, and one that never drafts
    256 rows     96 tokens behind prompts of 1024: plain, and k = 2 at a length of 2.2

A shape is loaded once; each way has an engine of its own. The best of the runs counts; of many rows the median of the
steps in which all of them decode: towards the end rows finish one by one, in shapes that may have no graph yet.
"""

import argparse
import gc
import random
import statistics
import time
from typing import Any, NamedTuple

import torch

from cairn.bench.engine_run import Run, serve
from cairn.bench.prompted import Prompted
from cairn.bench.record import add_arguments, record, write
from cairn.bench.throughput import ledger
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.speculate.synthetic import make_synthetic_on_device, rates_of_length
from cairn.serve.engine.start import start_with

PROMPT, MANY_PROMPT = 128, 1024


class Way(NamedTuple):
    name: str
    drafts: int | str = 0  # of `--draft-tokens`; 0: no drafter
    length: float = 1.0  # of the runs; 1: drafts are always wrong
    never: bool = False  # the controller sees no gain in any draft
    who: str = "ngram"


ALONE = (
    Way("plain"),
    Way("k = 4, length 3.0", 4, 3.0),
    Way("head, k = 4, length 3.0", 4, 3.0, who="random:eagle3"),
    Way("k = 4, always wrong", 4),
    Way("k chosen, always wrong", "auto"),
    Way("k chosen, length 3.0", "auto", 3.0),
    Way("k = 0 by the controller", "auto", never=True),
)
MANY = (Way("plain"), Way("k = 2, length 2.2", 2, 2.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--outputs", type=int, help="tokens of each answer, to try it out")
    parser.add_argument("--device", default="cuda")
    add_arguments(parser)
    options = parser.parse_args()
    results = []
    for shape in options.shapes:
        opened = open_model(f"random:{shape}")
        runnable = opened.load(options.device, "auto")
        for rows in options.rows:
            for way in ALONE if rows == 1 else MANY:
                results.append(measure(opened, runnable, rows, way, options))
                print_row(results[-1], results)
                if options.out:  # so that little is lost when the time is over
                    write({"results": results}, options.out)
                gc.collect()
                torch.cuda.empty_cache()
        del opened, runnable
    record(results, options)


def measure(
    opened: OpenModel, runnable: Runnable, rows: int, way: Way, options: argparse.Namespace
) -> dict[str, Any]:
    engine, steps_N = engine_of(opened, runnable, rows, way)
    outputs = options.outputs or (256 if rows == 1 else 96)
    prompt = PROMPT if rows == 1 else MANY_PROMPT
    chance = random.Random(0)
    vocabulary = min(opened.spec.vocab, 10000)
    asked = [
        Prompted([chance.randrange(vocabulary) for _ in range(prompt)], outputs)
        for _ in range(rows)
    ]

    def run() -> Run:
        steps_N.zero_()  # the same runs hold each time, so the first captures every graph that the others replay
        return serve(engine, asked)

    run()
    best = min((run() for _ in range(options.repeats)), key=lambda one: one.seconds)
    if best.failure is not None:
        raise SystemExit(f"{opened.name}, {rows} rows, {way.name}: {best.failure}")
    times = ledger(best.times)
    return {
        "shape": opened.name,
        "rows": rows,
        "way": way.name,
        "tokens_per_s": round(rate(best, rows, outputs), 1),
        "length": best.length,
        "steps": best.steps,
        "ms": {
            part: round(getattr(times, f"{part}_ms"), 3)
            for part in ("schedule", "launch", "wait", "update")
        },
    }


def rate(run: Run, rows: int, outputs: int) -> float:
    """Tokens per second: of one row with its prompt, of many in the median step in which all of them decode."""
    if rows == 1:
        return outputs / run.seconds
    turns = [turn.total for turn in run.times if not turn.prefill and turn.sampled == rows]
    return rows * (run.length or 1.0) / statistics.median(turns)


def engine_of(
    opened: OpenModel, runnable: Runnable, rows: int, way: Way
) -> tuple[Engine, torch.Tensor]:
    """And the counts of steps by which drafts hold."""
    config = EngineConfig(
        model=opened.name,
        max_model_len=2048,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.8,
        speculate=way.who if way.drafts else "off",
        draft_tokens=way.drafts or "auto",  # type: ignore[arg-type]
    )
    engine = start_with(opened, runnable, config).engine
    speculation, steps_N = engine.scheduler.speculation, torch.zeros(rows)
    if speculation is not None:
        drafts = engine.scheduler.limits.drafts
        rates = rates_of_length(way.length, drafts) if way.length > 1 else [0.0] * drafts
        steps_N = make_synthetic_on_device(engine.runner, rates)
        if way.never:
            speculation.wait_s = 1e3
    return engine, steps_N


def print_row(row: dict[str, Any], results: list[dict[str, Any]]) -> None:
    same = (
        r
        for r in results
        if (r["shape"], r["rows"], r["way"]) == (row["shape"], row["rows"], "plain")
    )
    plain = next(same)["tokens_per_s"]
    parts = " ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
    print(
        f"{time.strftime('%H:%M:%S')} {row['shape']:18s} {row['rows']:4d} rows  {row['way']:24s} "
        f"{row['tokens_per_s']:8.0f} tok/s  {row['tokens_per_s'] / plain:5.3f}x  length {row['length'] or 1:.2f}  "
        f"steps {row['steps']}  ms: {parts}",
        flush=True,
    )


if __name__ == "__main__":
    main()
