"""What does the server do with five times the load that it can take?

    python benchmarks/overload.py --seconds 60 --out benchmarks/cpu/overload.json

One process serves over an engine that only keeps time (`paced_engine`), so that its capacity is known and the machine
does not matter; this one sends. First a closed loop measures the capacity, then requests arrive at random at `--times`
as many a second. Every one of them has to be answered in full, or refused with 429 or 503 and a time to come again.
Goodput is answers that were complete, and began within the deadline, in a second of the load.
"""

import argparse
import multiprocessing
import random
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import uvloop

from cairn.bench.load_answer import RequestRecord
from cairn.bench.load_client import LoadClient, Target
from cairn.bench.load_drive import closed_loop, open_loop
from cairn.bench.load_prompts import LoadRequest
from cairn.bench.paced_engine import capacity
from cairn.bench.paced_server import PacedServer
from cairn.bench.record import add_arguments, record
from cairn.models.runnable import open_model
from cairn.serve.engine.request import Limits


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct", help="its tokenizer is used")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--times", type=float, default=5.0, help="the capacity")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument(
        "--tokens", type=int, default=32, help="of an answer; half to one and a half times that"
    )
    parser.add_argument(
        "--deadline", type=float, default=5.0, help="for the first token, in seconds"
    )
    parser.add_argument("--max-waiting", type=int, default=1024)
    add_arguments(parser)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    pipe, far = context.Pipe()
    process = context.Process(target=serve, args=(far, options), daemon=True)
    process.start()
    results = uvloop.run(measure(pipe, options))
    pipe.send("stop")
    results["left_in_the_server"] = pipe.recv()
    process.join(30)
    record(results, options)


def serve(pipe: Connection, options: argparse.Namespace) -> None:
    opened = open_model(options.model)
    limits = Limits(rows=options.rows, step_tokens=4096, context=512, pages=options.rows * 40, page_size=16,
                    vocabulary=opened.spec.vocab)  # fmt: skip
    step_s = options.step_ms / 1000
    settings = dict(max_waiting=options.max_waiting, first_token_deadline=options.deadline)
    with PacedServer(opened, limits, lambda step: step_s, **settings) as server:
        pipe.send(server.url)
        while pipe.recv() == "steps":
            pipe.send(server.engine.steps)
        admission, used = server.service.admission, server.engine.scheduler.blocks.usage().used
        pipe.send({"open": len(server.service.open), "inside": admission.inside, "pages": used})


def asks(tokens: int) -> Any:
    draw = random.Random(1)
    while True:
        yield LoadRequest("Tell me about cairns", draw.randint(tokens // 2, tokens * 3 // 2))


async def measure(pipe: Connection, options: argparse.Namespace) -> dict[str, Any]:
    url: str = pipe.recv()
    ideal = capacity(options.rows, options.step_ms / 1000, options.tokens)
    async with LoadClient(Target(url=url, model="paced", timeout_s=120)) as client:
        before = await measure_capacity(client, options)
        arrivals = random_arrivals(options.times * before, options.seconds)
        steps = count_steps(pipe)
        records = await open_loop(client, asks(options.tokens), arrivals)
        steps = count_steps(pipe) - steps
        most = (
            before + await measure_capacity(client, options)
        ) / 2  # the machine may have changed meanwhile
    return {
        "capacity_per_s": round(most, 2),
        "ideal_capacity_per_s": round(ideal, 2),
        "arrivals_per_s": round(options.times * before, 1),
        "deadline_s": options.deadline,
        "seconds": options.seconds,
    } | judge(records, len(arrivals), most, steps, options)


def count_steps(pipe: Connection) -> int:
    pipe.send("steps")
    return pipe.recv()


async def measure_capacity(client: LoadClient, options: argparse.Namespace) -> float:
    """Twice the rows at a time: somebody always waits, so that no row is ever free. The ends are left out."""
    found = await closed_loop(client, asks(options.tokens), options.rows * 2, duration_s=12)
    began = min(record.sent_s for record in found)
    return sum(2 <= record.end_s - began < 12 for record in found) / 10


def random_arrivals(rate: float, seconds: float) -> list[float]:
    draw, at, found = random.Random(2), 0.0, []
    while at < seconds:
        at += draw.expovariate(rate)
        found.append(at)
    return found


def judge(
    records: list[RequestRecord], sent: int, most: float, steps: int, options: argparse.Namespace
) -> dict[str, Any]:
    answered = [r for r in records if r.error is None]
    complete = [r for r in answered if r.output_tokens == r.asked_tokens]
    good = [r for r in complete if r.ttft_s is not None and r.ttft_s <= options.deadline]
    first = sorted(r.ttft_s for r in answered if r.ttft_s is not None)
    refused = [r for r in records if r.error in ("http 429", "http 503")]
    late = [r for r in refused if r.e2e_s > options.deadline / 2]  # waited, and in vain
    began = min(r.due_s for r in records)
    within = [r for r in good if 2 <= r.end_s - began < options.seconds]  # while the load lasts
    goodput = len(within) / (options.seconds - 2)
    return {
        "sent": sent, "lost": sent - len(records), "complete": len(complete), "cut": len(answered) - len(complete),
        "errors": dict(Counter(r.error for r in records if r.error)),
        "kinds": dict(Counter((r.detail or "")[:40] for r in refused)),
        "refused_after_waiting": len(late),
        "refusal_p99_ms": round(1000 * quantile(sorted(r.e2e_s for r in refused), 0.99), 1) if refused else None,
        "ttft_p50_s": round(quantile(first, 0.5), 3), "ttft_p99_s": round(quantile(first, 0.99), 3),
        "ttft_max_s": round(first[-1], 3),
        "goodput_per_s": round(goodput, 2), "goodput_share": round(goodput / most, 3),
        # Of what the steps that were taken could have given; the end, when nobody comes any more, included.
        "good_tokens_share_of_rows": round(sum(r.output_tokens for r in good) / (steps * options.rows), 3),
    }  # fmt: skip


def quantile(values: list[float], share: float) -> float:
    return float(np.quantile(values, share))


if __name__ == "__main__":
    main()
