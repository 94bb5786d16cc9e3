"""What drafts are worth on one GPU, with random weights and acceptance dialled in.

    python benchmarks/speculate.py --out benchmarks/h200/speculate.json
    python benchmarks/speculate.py --shapes qwen3-0.6b --rows 1 --merge --out benchmarks/h200/speculate.json

    one row      256 tokens behind a prompt of 128: plain, k = 4 at a length of 3.0 (n-grams, then an EAGLE-3 head with
                 random weights), always wrong with k = 4 and with k chosen by the controller, and one that never drafts
    json         one row, an answer of a JSON schema: plain, and with the tokens that the schema forces as drafts
    w4a16        one row with weights in 4 bits, the output projection in 8: plain, a head and n-grams as above; last,
                 because weights are replaced
    256 rows     96 tokens behind prompts of 1024: plain, and k = 2 at a length of 2.2

Each way has an engine of its own, over the same weights. The best of the runs behind a short one counts; of many rows
one run, and in it the median of the steps in which all decode: at the end rows finish one by one, in shapes that may
have no graph yet. The record is written after every way.
"""

import argparse
import itertools
import random
import statistics
import time
from typing import Any, NamedTuple

import msgspec
import torch

from cairn.bench.engine_run import EngineRun, serve
from cairn.bench.record import add_arguments, current_commit, not_again, record
from cairn.bench.throughput import ledger, release
from cairn.bench.workload_request import WorkloadRequest
from cairn.models.runnable import OpenModel, Runnable, open_model
from cairn.serve.config import EngineConfig
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.acceptance import Counts
from cairn.serve.engine.speculate.synthetic import make_synthetic_on_device, rates_of_length
from cairn.serve.engine.start import start_with
from cairn.serve.grammar import Grammar, Grammars
from cairn.serve.structured_output import schema_guide

PROMPT, MANY_PROMPT, PAGE = 128, 1024, 64
WARM = 64  # tokens of an answer that is not counted: behind it everything is compiled


class Way(NamedTuple):
    name: str
    drafts: int | str = 0  # of `--draft-tokens`; 0: no drafter
    length: float = 1.0  # of the runs; 1: drafts are always wrong
    never: bool = False  # the controller sees no gain in any draft
    who: str = "ngram"
    weights: str = "auto"
    schema: bool = False  # the answer is a JSON object


ALONE = (
    Way("plain"),
    Way("k = 4, length 3.0", 4, 3.0),
    Way("head, k = 4, length 3.0", 4, 3.0, who="random:eagle3"),
    Way("k = 4, always wrong", 4),
    Way("k chosen, always wrong", "auto"),
    Way("k chosen, length 3.0", "auto", 3.0),
    Way("k = 0 by the controller", "auto", never=True),
)
JSON = (
    Way("json, plain", schema=True),
    Way("json, forced tokens", 7, who="grammar", schema=True),
)
W4A16 = (
    Way("w4a16, plain", weights="w4a16"),
    Way("w4a16, head, k = 4, length 3.0", 4, 3.0, who="random:eagle3", weights="w4a16"),
    Way("w4a16, k = 4, length 3.0", 4, 3.0, weights="w4a16"),
)
MANY = (Way("plain"), Way("k = 2, length 2.2", 2, 2.2))
KINDS = {"bf16": ALONE, "json": JSON, "w4a16": W4A16}
SCHEMA = {
    "type": "object",
    "properties": {
        "animal_kind": {"enum": ["cat", "dog", "bird"]},
        "age_in_years": {"type": "integer", "minimum": 1, "maximum": 20},
        "city_name": {"type": "string", "maxLength": 12},
        "lives_indoors": {"type": "boolean"},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["animal_kind", "age_in_years", "city_name", "lives_indoors", "favourite_colour"],
    "additionalProperties": False,
}
ASKED_AGAIN = 4  # times in a run: an answer of a schema is short


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["qwen3-8b", "qwen3-0.6b"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", default="", help="ways whose name has this")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--w4a16", nargs="*", default=["qwen3-8b"], help="shapes of that kind")
    parser.add_argument("--outputs", type=int, help="tokens of each answer, to try it out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--merge", action="store_true", help="keep what else the file of --out has")
    add_arguments(parser)
    options = parser.parse_args()
    if options.merge and not (options.out and options.out.is_file()):
        parser.error("--merge needs --out with a file that exists")
    results: list[dict[str, Any]] = []
    old = msgspec.json.decode(options.out.read_bytes()) if options.merge else {}
    for rows, shape in itertools.product(options.rows, options.shapes):
        opened = open_model(f"random:{shape}")
        runnable = opened.load(options.device, "auto")
        for way in ways_of(shape, rows, options):
            try:
                results.append(measure(opened, runnable, rows, way, options))
            except Exception as problem:  # noqa: BLE001  the others may still be measured
                print(f"{shape}, {rows} rows, {way.name}: left out: {problem!r}", flush=True)
                continue
            finally:
                release()
            print_row(results[-1], results)
            keep(results, old, options)
        del opened, runnable
        release()


def keep(results: list[dict[str, Any]], old: dict[str, Any], options: argparse.Namespace) -> None:
    """Write the record with what is measured so far, and what an old one has besides."""
    kept = not_again(old.get("results", []), results, _which)
    ordered = sorted([*kept, *results], key=lambda row: (row["rows"], row["shape"]))
    record(ordered, options, old.get("command"), show=False)


def ways_of(shape: str, rows: int, options: argparse.Namespace) -> list[Way]:
    kinds = [kind for kind in options.kinds if kind != "w4a16" or shape in options.w4a16]
    ways = MANY if rows > 1 else [way for kind in kinds for way in KINDS[kind]]
    return [way for way in ways if options.only in way.name]


def measure(
    opened: OpenModel, runnable: Runnable, rows: int, way: Way, options: argparse.Namespace
) -> dict[str, Any]:
    engine, steps_N = engine_of(opened, runnable, rows, way)
    outputs = options.outputs or (256 if rows == 1 else 96)
    prompt = PROMPT if rows == 1 else MANY_PROMPT
    chance = random.Random(0)
    vocabulary = min(opened.spec.vocab, 10000)
    prompts = [[chance.randrange(vocabulary) for _ in range(prompt)] for _ in range(rows)]
    grammar = grammar_of(opened.spec.vocab) if way.schema else None

    def run(outputs: int) -> EngineRun:
        if grammar is not None:
            return serve_schema(engine, prompts[0], grammar)
        steps_N.zero_()  # the same runs of drafts hold each time
        return serve(engine, [WorkloadRequest(own, outputs) for own in prompts])

    if rows == 1:
        run(min(outputs, WARM))
    repeats = options.repeats if rows == 1 else 1  # most of such a run is prompts
    best = min((run(outputs) for _ in range(repeats)), key=lambda one: one.seconds)
    if best.failure is not None:
        raise RuntimeError(best.failure)
    times = ledger(best.times)
    return {
        "shape": opened.name,
        "rows": rows,
        "way": way.name,
        "commit": options.commit or current_commit(),
        "tokens_per_s": round(rate(best, rows, outputs), 1)
        if grammar is None
        else schema_rate(best),
        "length": best.length,
        "steps": best.steps,
        "ms": {
            part: round(getattr(times, f"{part}_ms"), 3)
            for part in ("schedule", "launch", "wait", "update")
        },
    }


def rate(run: EngineRun, rows: int, outputs: int) -> float:
    """Tokens per second: of one row with its prompt, of many in the median step in which all of them decode."""
    if rows == 1:
        return outputs / run.seconds
    turns = [turn.total for turn in run.times if not turn.prefill and turn.sampled == rows]
    return rows * (run.length or 1.0) / statistics.median(turns)


def grammar_of(vocabulary: int) -> Grammar:
    """Of the schema, in the tokens of a small model: random weights have none of their own."""
    small = open_model("cairn-tiny")
    assert small.tokenizer is not None
    grammars = Grammars(small.tokenizer, vocabulary, small.eos_ids)
    return grammars.compile(schema_guide(SCHEMA, "the schema"))


def serve_schema(engine: Engine, prompt: list[int], grammar: Grammar) -> EngineRun:
    """A few answers one after another; `Run.seconds` is the time of a token behind the first."""
    speculation, first = engine.scheduler.speculation, engine.steps
    counts = speculation.counts if speculation is not None else Counts()
    runs, held = counts.runs, counts.accepted
    seconds, tokens = 0.0, 0
    for _ in range(ASKED_AGAIN):
        params = SamplingParams(temperature=0, max_tokens=256)
        request = Request(time.monotonic_ns(), prompt, params, constraint=grammar.start())
        engine.add(request)
        while not request.outputs and engine.has_work:
            engine.step()
        began = time.perf_counter()
        engine.run()
        seconds += time.perf_counter() - began
        if request.error is not None or len(request.outputs) < 2:
            raise RuntimeError(request.error or f"an answer of {len(request.outputs)} tokens")
        tokens += len(request.outputs) - 1
    steps = engine.steps - first
    length = counts.length_since(runs, held)
    return EngineRun(seconds / tokens, steps, list(engine.times)[-steps:], None, length)


def schema_rate(run: EngineRun) -> float:
    return round(1 / run.seconds, 1)


def engine_of(
    opened: OpenModel, runnable: Runnable, rows: int, way: Way
) -> tuple[Engine, torch.Tensor]:
    """And the counts of steps by which drafts hold. Weights in few bits stay so for the engines behind the first."""
    weights = way.weights if not converted(runnable) else "auto"
    context = 2048 if rows == 1 else MANY_PROMPT + 256
    config = EngineConfig(
        model=opened.name,
        max_model_len=context,
        max_num_seqs=rows,
        enable_prefix_caching=False,
        block_size=PAGE,
        num_gpu_blocks_override=1 + rows * context // PAGE,
        speculate=way.who if way.drafts else "off",
        draft_tokens=way.drafts or "auto",  # type: ignore[arg-type]
        weights=weights,
        head="auto" if weights == "auto" else "8bit",
    )
    engine = start_with(opened, runnable, config, sole=way.weights != "auto").engine
    speculation, steps_N = engine.scheduler.speculation, torch.zeros(rows)
    if speculation is not None and not way.schema:
        drafts = engine.scheduler.limits.drafts
        rates = rates_of_length(way.length, drafts) if way.length > 1 else [0.0] * drafts
        steps_N = make_synthetic_on_device(engine.runner, rates)
        if way.never:
            speculation.wait_s = 1e3
    return engine, steps_N


def converted(runnable: Runnable) -> bool:
    """An engine before this one has left the weights in another form."""
    return any(getattr(part, "form", None) is not None for part in runnable.model.modules())


def print_row(row: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """With its ratio to the plain way of the same shape, rows and kind, if that could be measured."""
    alike = (r for r in results if r["way"].endswith("plain") and _setting(r) == _setting(row))
    plain = next(alike, None)
    ratio = f"{row['tokens_per_s'] / plain['tokens_per_s']:5.3f}x" if plain else "     -"
    parts = " ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
    print(
        f"{time.strftime('%H:%M:%S')} {row['shape']:18s} {row['rows']:4d} rows  {row['way']:24s} "
        f"{row['tokens_per_s']:8.0f} tok/s  {ratio}  length {row['length'] or 1:.2f}  "
        f"steps {row['steps']}  ms: {parts}",
        flush=True,
    )


def _which(row: dict[str, Any]) -> tuple[str, int, str]:
    return row["shape"], row["rows"], row["way"]


def _setting(row: dict[str, Any]) -> tuple[str, int, str]:
    kind = row["way"].partition(",")[0]
    return row["shape"], row["rows"], kind if kind in KINDS else "bf16"


if __name__ == "__main__":
    main()
