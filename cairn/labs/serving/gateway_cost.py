"""What does everything in front of the model cost, per request and per token?

    client --HTTP--> parse, tokenize, admit --> engine (known pace) --> detokenize, SSE --> client

The device is a clock, so answers per second should be rows / (tokens x step). What the server cannot keep up with is
its own time: Python, sockets, JSON. A fast gateway in Go or Rust does the same work; here it is measured.
"""

import asyncio
import itertools
import time

from cairn.labs.lab import Check, Outcome, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

TOKENS = 32  # of an answer
ROWS, STEP_S = 16, 0.02


def load(url: str, clients: int, count: int) -> tuple[float, float, int]:
    """Answers and tokens a second of so many clients at once, and how many failed."""
    from cairn.bench.load_client import LoadClient, Target
    from cairn.bench.load_drive import closed_loop
    from cairn.bench.load_prompts import LoadRequest

    async def drive() -> tuple[float, float, int]:
        async with LoadClient(Target(url=url, model="paced", timeout_s=30)) as client:
            asks = itertools.repeat(LoadRequest([5, 6, 7, 8], TOKENS))
            began = time.perf_counter()
            records = await closed_loop(client, asks, clients, count)
            took = time.perf_counter() - began
            fine = [record for record in records if record.error is None]
            return (
                len(fine) / took,
                sum(r.output_tokens for r in fine) / took,
                len(records) - len(fine),
            )

    return asyncio.run(drive())


def run(bench: Workbench) -> Outcome:
    from cairn.bench.paced_engine import capacity
    from cairn.labs.serving._server import paced

    foreseen = capacity(ROWS, STEP_S, TOKENS)
    bench.step("a device of 20 ms a step")
    with paced(ROWS, STEP_S) as server:
        load(server.url, ROWS, ROWS)  # warm
        answers, tokens, failed = load(server.url, ROWS, bench.pick(5, 2) * ROWS)
    bench.step("a device that takes no time: only the gateway is left")
    count = bench.pick(12, 4) * ROWS
    with paced(ROWS, 0.0) as server:
        load(server.url, ROWS, ROWS)
        began = time.process_time()
        free, free_tokens, failed_too = load(server.url, ROWS, count)
        own = time.process_time() - began
    per_token = own / (count * TOKENS)  # server and client together, of this process
    return Outcome(
        checks=_checks(foreseen, answers, failed + failed_too, per_token),
        table=_table(
            [
                ["20 ms", foreseen, answers, tokens, 1e6 / tokens],
                ["0 ms", "-", free, free_tokens, 1e6 / free_tokens],
            ]
        ),
        notes=[_note(bench, free_tokens)],
    )


def _checks(foreseen: float, answers: float, failed: int, per_token: float) -> list[Check]:
    return [
        Check(
            what=Words("answers a second at 20 ms a step", "每步 20 毫秒时每秒回答数"),
            predicted=foreseen,
            measured=answers,
            unit="1/s",
            within=0.35,
        ),
        Check(
            what=Words("requests that failed", "失败的请求数"),
            predicted=0,
            measured=failed,
            unit="requests",
        ),
        Check(
            what=Words(
                "CPU time of a streamed token, server and client",
                "每个流式 token 的 CPU 时间（服务端+客户端）",
            ),
            predicted=150.0,
            measured=per_token * 1e6,
            unit="us",
            kind="at_most",
        ),
    ]


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("device step", "设备单步"),
            Words("answers/s foreseen", "预测回答/秒"),
            Words("answers/s", "回答/秒"),
            Words("tokens/s", "tokens/s"),
            Words("us a token", "微秒/token"),
        ],
        rows=rows,
    )


def _note(bench: Workbench, tokens: float) -> Words:
    trip = bench.ceilings.loopback_round_trip
    us = trip.value * 1e6 if trip else float("nan")
    return Words(
        f"A bare round trip on loopback is {us:.0f} us; 16 rows at 5 ms a step would need {16 / 0.005:.0f} "
        f"tokens/s of the gateway, it makes {tokens:.0f}.",
        f"loopback 一次往返约 {us:.0f} 微秒；16 行、每步 5 毫秒需要网关每秒 {16 / 0.005:.0f} token，"
        f"实测可达 {tokens:.0f}。",
    )


LAB = described(__file__, run)
