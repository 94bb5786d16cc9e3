"""What does everything in front of the model cost, per request and per token?

    client --HTTP--> parse, tokenize, admit --> engine (known pace) --> detokenize, SSE --> client

The device is a clock, so answers per second should be rows / (tokens x step). What the server cannot keep up with is
its own time: Python, sockets, JSON. A fast gateway in Go or Rust does the same work; here it is measured.
"""

import asyncio
import itertools
import time

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
from cairn.labs.workbench import Workbench

TOKENS = 32


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

    rows_count, step_s = 16, 0.02
    table: list[list[str | float | int]] = []
    bench.step("a device of 20 ms a step")
    with paced(rows_count, step_s) as server:
        load(server.url, rows_count, rows_count)  # warm
        answers, tokens, failed = load(server.url, rows_count, bench.pick(5, 2) * rows_count)
    table.append(["20 ms", capacity(rows_count, step_s, TOKENS), answers, tokens, 1e6 / tokens])
    bench.step("a device that takes no time: only the gateway is left")
    with paced(rows_count, 0.0) as server:
        load(server.url, rows_count, rows_count)
        began = time.process_time()
        free, free_tokens, failed_too = load(server.url, rows_count, bench.pick(12, 4) * rows_count)
        own = time.process_time() - began
    count = bench.pick(12, 4) * rows_count
    per_token = own / (count * TOKENS)  # server and client together, of this process
    table.append(["0 ms", "-", free, free_tokens, 1e6 / free_tokens])
    round_trip = bench.ceilings.loopback_round_trip
    return Outcome(
        checks=[
            Check(
                what=Words("answers a second at 20 ms a step", "每步 20 毫秒时每秒回答数"),
                predicted=capacity(rows_count, step_s, TOKENS),
                measured=answers,
                unit="1/s",
                within=0.5,
            ),
            Check(
                what=Words("requests that failed", "失败的请求数"),
                predicted=0,
                measured=failed + failed_too,
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
        ],
        table=Table(
            columns=[
                Words("device step", "设备单步"),
                Words("answers/s foreseen", "预测回答/秒"),
                Words("answers/s", "回答/秒"),
                Words("tokens/s", "tokens/s"),
                Words("us a token", "微秒/token"),
            ],
            rows=table,
        ),
        notes=[
            Words(
                f"A bare round trip on loopback is {round_trip.value * 1e6 if round_trip else float('nan'):.0f} us; "
                f"16 rows at 5 ms a step would need {16 / 0.005:.0f} tokens/s of the gateway, it makes "
                f"{free_tokens:.0f}.",
                f"loopback 一次往返约 {round_trip.value * 1e6 if round_trip else float('nan'):.0f} 微秒；16 行、每步 "
                f"5 毫秒需要网关每秒 {16 / 0.005:.0f} token，实测可达 {free_tokens:.0f}。",
            )
        ],
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
        "cairn/serve/http/service.py:Service",
        "cairn/serve/http/sse.py:EventStream",
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
