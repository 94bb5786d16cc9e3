"""What does everything in front of the model cost, per request and per token?

    client --HTTP--> parse, tokenize, admit --> engine (known pace) --> detokenize, SSE --> client

The device is a clock, so answers per second should be rows / (tokens x step). What the server cannot keep up with is
its own time: Python, sockets, JSON. A fast gateway in Go or Rust does the same work; here it is measured.
"""

import asyncio
import itertools
import time

from cairn.labs.lab import Check, Lab, Outcome, Question, Rows, Table, Words
from cairn.labs.workbench import Workbench

TOKENS = 32  # of an answer
ROWS, STEP_S = 16, 0.02


def load(url: str, clients: int, count: int) -> tuple[float, float, int]:
    """Answers and tokens a second of so many clients at once, and how many failed."""
    from cairn.bench.load_client import LoadClient, Target
    from cairn.bench.load_drive import closed_loop
    from cairn.bench.load_prompts import Ask

    async def drive() -> tuple[float, float, int]:
        async with LoadClient(Target(url=url, model="paced", timeout_s=30)) as client:
            asks = itertools.repeat(Ask([5, 6, 7, 8], TOKENS))
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


LAB = Lab(
    name="gateway-cost",
    area="serving",
    title=Words("What the gateway costs", "网关的代价"),
    hypothesis=Words(
        "While a step is long against what the host does for it, the server makes rows / (tokens x step) answers a "
        "second; with a device that takes no time, what is left is the gateway: under 0.15 ms of CPU for each "
        "streamed token.",
        "当一步远长于主机开销时，服务器每秒完成 行数/(token 数×步长) 个回答；设备零耗时时剩下的就是网关本身："
        "每个流式 token 的 CPU 不到 0.15 毫秒。",
    ),
    run=run,
    causes=(
        Words(
            "the CPU is shared with other processes: client, server and engine all wait for it",
            "CPU 被其他进程占用，客户端、服务端、引擎都在等",
        ),
        Words(
            "client and server share one Python process here, and one interpreter lock",
            "此处客户端和服务端在同一 Python 进程，共享一把 GIL",
        ),
    ),
    code=(
        "cairn/serve/http/server/service.py:Service",
        "cairn/serve/http/server/sse.py:EventStream",
        "cairn/bench/load_client.py:LoadClient",
        "cairn/bench/paced_engine.py:capacity",
    ),
    reading=("The Tail at Scale (2013)", "Server-Sent Events, HTML Living Standard"),
    questions=(
        Question(
            Words(
                "A step takes 5 ms with 256 rows. What does the gateway have to sustain?",
                "一步 5 毫秒、256 行，网关要承受多大流量？",
            ),
            Words(
                "51,200 events a second. At 100 us each that is five cores, so events of one step are sent "
                "together, and several HTTP processes share the sockets.",
                "每秒 51,200 个事件。每个 100 微秒就要 5 个核，所以同一步的事件要合并发送，并用多个 HTTP "
                "进程分担连接。",
            ),
        ),
        Question(
            Words("What belongs into a gateway?", "网关应该做什么？"),
            Words(
                "Keys, rate limits by tokens, admission with 429 instead of an endless line, routing, timeouts, and "
                "that a client who leaves frees its row.",
                "鉴权、按 token 限流、准入（返回 429 而不是无限排队）、路由、超时，以及客户端断开时立即释放行。",
            ),
        ),
        Question(
            Words("Would Go make this faster?", "换成 Go 会更快吗？"),
            Words(
                "Per event, several times: goroutines use all cores without an interpreter lock. It matters only "
                "when the gateway's time per step nears the device's; measure that ratio first.",
                "单个事件能快几倍：goroutine 没有 GIL、能用满多核。只有网关每步耗时接近设备步长时才重要，"
                "应先测这个比例。",
            ),
        ),
    ),
    seconds=8.0,
)
