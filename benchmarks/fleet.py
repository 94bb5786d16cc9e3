"""Do real servers behind the real router do what `cairn simulate fleet` says?

    python benchmarks/fleet.py --servers 4 --requests 160 --load 0.8 --slower 60 --out benchmarks/cpu/fleet.json

Conversations are replayed twice: through the simulation, and over HTTP to a router and servers in processes of their
own, whose engines schedule, cache and stream as always and only wait for as long as a step is said to take. `--slower`
stretches all times, so that what this machine needs for everything else counts less. The simulation is also run many
times with small disturbances: its figures are intervals then, and each of the real ones lies within or not. A tail of
a hundred requests is a few of them, and depends on what nobody can know to a tenth. Needs no GPU.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.bench.arrival_traces import BLOCK_TOKENS, TracedRequest
from cairn.bench.record import add_arguments, record
from cairn.fleet.simulate import Outcome, run_policy, span_s
from cairn.fleet.simulate_prompts import conversations, fitting, prompts_of
from cairn.fleet.simulate_replica import speed_of
from cairn.plan.slo import Slo
from cairn.serve.engine.request import Limits
from cairn.serve.engine.step import Step

MODEL, VOCABULARY = "cairn-tiny", 4096
LIMITS = Limits(
    rows=32, step_tokens=2048, context=8192, pages=800, page_size=64, vocabulary=VOCABULARY
)
READY_S = 120.0
WARM_BLOCKS = 10**9  # from here on
AHEAD_S = 2e-3  # of the host between two steps, in the time of the trace: it is not simulated
RUNS = 200  # of the perturbed simulation
LATE_S, OFF = 0.5, 0.05  # of its arrivals, in the time of the trace; of its steps, more or less
SLO = Slo(1.0, 0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="be one of the servers")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--slower", type=float, default=10.0)
    parser.add_argument("--policy", default="seconds")
    add_arguments(parser)
    given = parser.parse_args()
    if given.serve:
        serve(given.slower)
        return
    prompts = prompts_of(fitting(conversations(given.requests), LIMITS.context), LIMITS.page_size)
    slo = Slo(SLO.ttft_s * given.slower, SLO.tpot_s * given.slower)
    cost = Paced(given.slower)
    said = run_policy(given.policy, prompts, given.load, given.servers, LIMITS, cost, slo)
    speed = speed_of(cost)
    slower = span_s(prompts, speed, given.servers, given.load) / prompts[-1].traced.at_s
    with fleet(given.servers, given.slower, given.policy) as port:
        asyncio.run(replay(port, warm_up(4 * given.servers), given.slower))
        answers = asyncio.run(replay(port, [one.traced for one in prompts], slower))
    real = outcome(answers, slo)
    real["hit_share"] = sum(one.cached for one in answers) / sum(
        one.traced.input_tokens for one in prompts
    )
    spread = ranges(lambda seed: perturbed(given, slo, seed))
    within = {name: one.least <= real[name] <= one.most for name, one in spread.items()}
    off = {name: real[name] / one.median - 1 for name, one in spread.items()}
    results = {"simulated": said, "perturbed": spread, "real": real, "within": within, "off": off}
    record(results, given)


def perturbed(given: argparse.Namespace, slo: Slo, seed: int) -> Outcome:
    """The simulation with arrivals that are a little late, and steps that are off: all of them alike, and each one."""
    draw, cost = random.Random(seed), Paced(given.slower)
    machine = draw.uniform(1 - OFF, 1 + OFF)
    trace = [
        msgspec.structs.replace(one, at_s=one.at_s + draw.uniform(0, LATE_S))
        for one in fitting(conversations(given.requests), LIMITS.context)
    ]
    prompts = prompts_of(sorted(trace, key=lambda one: one.at_s), LIMITS.page_size)

    def step_s(step: Step) -> float:
        return cost(step) * machine * draw.uniform(1 - OFF, 1 + OFF)

    return run_policy(given.policy, prompts, given.load, given.servers, LIMITS, step_s, slo)


class Spread(msgspec.Struct, frozen=True):
    """Of one figure, over all disturbed simulations."""

    least: float
    median: float
    most: float


def ranges(run: Callable[[int], Outcome]) -> dict[str, Spread]:
    """Of each figure: a tail that depends on what a simulation cannot know is no single number."""
    found = [run(seed) for seed in range(RUNS)]
    names = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "goodput", "hit_share")
    values = {name: sorted(getattr(one, name) for one in found) for name in names}
    return {name: Spread(v[0], v[len(v) // 2], v[-1]) for name, v in values.items()}


def outcome(answers: Sequence["Answer"], slo: Slo) -> dict[str, float]:
    first = sorted(one.first_s - one.due_s for one in answers)
    each = sorted(one.token_s for one in answers)
    good = sum(
        one.first_s - one.due_s <= slo.ttft_s and one.token_s <= slo.tpot_s for one in answers
    )
    return {
        "ttft_p50_s": first[len(first) // 2],
        "ttft_p99_s": first[min(int(0.99 * len(first)), len(first) - 1)],
        "tpot_p50_s": each[len(each) // 2],
        "tpot_p99_s": each[min(int(0.99 * len(each)), len(each) - 1)],
        "good_share": good / len(answers),
        "goodput": good / (max(one.ended_s for one in answers) - answers[0].due_s),
    }


def warm_up(requests: int) -> list[TracedRequest]:
    """So that servers have told how fast they are. No conversation begins with one of these blocks."""
    return [
        TracedRequest(at / 20, 2 * BLOCK_TOKENS, 20, (block, block))
        for at, block in enumerate(range(WARM_BLOCKS, WARM_BLOCKS + requests))
    ]


class Paced:
    """Seconds of a step: a fixed part, and one for each of its tokens."""

    def __init__(self, slower: float) -> None:
        self._slower = slower

    def __call__(self, step: Step) -> float:
        return self._slower * (5e-3 + 2e-5 * step.tokens)


def serve(slower: float) -> None:
    from cairn.bench.paced_server import PacedServer
    from cairn.models.runnable import open_model

    with PacedServer(
        open_model(MODEL), LIMITS, Paced(slower), prefix_caching=True, ahead_s=AHEAD_S * slower
    ) as server:
        print(server.url, flush=True)
        sys.stdin.read()  # until its parent closes it


@contextlib.contextmanager
def fleet(servers: int, slower: float, policy: str) -> Iterator[int]:
    """Servers and a router in processes of their own; the router's port."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, __file__, "--serve", "--slower", str(slower)]
        made = [started(stack, command) for _ in range(servers)]
        urls = [line_of(one, "http").strip() for one in made]
        file = folder / "fleet.toml"
        file.write_text(
            f'[router]\nport = 0\npolicy = "{policy}"\n[[servers]]\nurls = {json.dumps(urls)}\n'
        )
        router = started(stack, [sys.executable, "-m", "cairn", "fleet", "serve", str(file)])
        yield int(line_of(router, "ready").rpartition(":")[2])


def line_of(process: "subprocess.Popen[str]", beginning: str) -> str:
    """The first line that begins so."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        if line.startswith(beginning):
            return line
        lines.append(line)
    raise RuntimeError(f"it ended before a line with {beginning!r}: {''.join(lines)[-2000:]}")


def started(stack: contextlib.ExitStack, command: Sequence[str]) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    stack.callback(process.wait, READY_S)
    stack.callback(process.terminate)
    return process


class Answer(NamedTuple):
    due_s: float
    first_s: float
    ended_s: float
    token_s: float  # of each token after the first
    cached: int  # tokens of the prompt


async def replay(port: int, trace: Sequence[TracedRequest], slower: float) -> list[Answer]:
    written = [written_of(one) for one in trace]  # before the first one is due
    began = time.monotonic() + 1.0
    return await asyncio.gather(
        *(
            ask(port, one, what, began + one.at_s * slower)
            for one, what in zip(trace, written, strict=True)
        )
    )


def written_of(traced: TracedRequest) -> bytes:
    """The request, as it is sent."""
    ids = [token for block in traced.blocks or () for token in tokens_of(block)]
    body = json.dumps({"model": "paced", "prompt": ids[: traced.input_tokens], "stream": True,
                       "stream_options": {"include_usage": True}, "ignore_eos": True,
                       "max_tokens": traced.output_tokens}).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def ask(port: int, traced: TracedRequest, written: bytes, due: float) -> Answer:
    await asyncio.sleep(due - time.monotonic())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(written)
    await reader.readuntil(b"data: {")
    first = time.monotonic()
    rest = await reader.readuntil(b"[DONE]\n\n")
    ended = time.monotonic()
    writer.close()
    cached = re.search(rb'"cached_tokens":(\d+)', rest)
    each = (ended - first) / max(traced.output_tokens - 1, 1)
    return Answer(due, first, ended, each, int(cached[1]) if cached else 0)


def tokens_of(block: int) -> list[int]:
    draw = random.Random(block)  # which knows no sign
    return [draw.randrange(5, VOCABULARY) for _ in range(BLOCK_TOKENS)]


if __name__ == "__main__":
    main()
