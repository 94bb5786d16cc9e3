"""Load doubles at once, and a new replica takes a minute to start. How long is the line by then?

    before   rate below capacity                       line: none
    jump     (rate - capacity) x cold start            the line grows like this
    after    / (new capacity - rate)                   and so long it takes until it is gone

A fluid prediction beside the engine's own schedulers on a virtual clock.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Lines, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.labs.serving._fleet import Replica
    from cairn.serve.engine.request import Request

ROWS, STEP_S, OUTPUTS = 8, 0.05, 20
JUMP, END = 60.0, 360.0
BEFORE, AFTER = 6.0, 12.0  # requests a second


def waiting_after(cold: float, seed: int = 4) -> list[tuple[float, int]]:
    """(time, requests in line) with a replica that comes `cold` seconds after the jump."""
    from cairn.labs.serving._engine import ask
    from cairn.labs.serving._fleet import Replica, serve
    from cairn.serve.engine.request import Limits

    limits = Limits(
        rows=ROWS, step_tokens=512, context=256, pages=2048, page_size=16, vocabulary=64
    )
    fleet = [
        Replica(limits, lambda step: STEP_S, prefix_caching=False, since=since)
        for since in (0.0, JUMP + cold)
    ]
    draw, at, arrivals, line = random.Random(seed), 0.0, [], []
    while at < END:
        at += draw.expovariate(BEFORE if at < JUMP else AFTER)
        arrivals.append((at, ask(len(arrivals), [1], OUTPUTS)))

    def choose(all_: "Sequence[Replica]", request: "Request", now: float) -> int:
        line.append((now, sum(replica.scheduler.waiting for replica in all_)))
        up = [i for i, replica in enumerate(all_) if replica.since <= now]
        return min(up, key=lambda i: all_[i].load)

    serve(fleet, arrivals, choose)
    return line


def run(bench: Workbench) -> Outcome:
    capacity = ROWS / (OUTPUTS * STEP_S)  # requests a second of one replica
    colds = bench.pick((10.0, 30.0, 60.0), (30.0,))
    rows, lines, peaks, drained_at = [], {}, {}, {}
    for cold in colds:
        bench.step(f"a cold start of {cold:.0f} s")
        line = waiting_after(cold)
        peaks[cold] = max(waiting for _, waiting in line)
        drained_at[cold] = next(
            (at for at, waiting in line if at > JUMP + cold and waiting <= 2), END
        )
        lines[f"{cold:.0f} s"] = [
            (at, float(waiting)) for at, waiting in line[:: max(1, len(line) // 200)]
        ]
        rows.append([cold, (AFTER - capacity) * cold, peaks[cold], drained_at[cold] - JUMP - cold])
    at30 = (AFTER - capacity) * 30.0
    return Outcome(
        checks=[
            Check(
                what=Words("longest line after a cold start of 30 s", "冷启动 30 秒后的最长队列"),
                predicted=at30,
                measured=peaks[30.0],
                unit="requests",
                within=0.25,
            ),
            Check(
                what=Words("seconds until that line is gone", "队列消化完所需的秒数"),
                predicted=at30 / (2 * capacity - AFTER),
                measured=drained_at[30.0] - JUMP - 30.0,
                unit="s",
                within=0.25,
            ),
            Check(
                what=Words(
                    "line with the replicas for 12 requests/s there from the start, over the line without",
                    "一开始就有足够副本时的最长队列与冷启动时之比",
                ),
                predicted=0.3,
                measured=max(waiting for _, waiting in waiting_after(-JUMP)) / peaks[30.0],
                unit="x",
                kind="at_most",
            ),
        ],
        plots=[_plot(lines)],
        table=_table(rows),
        notes=[_note(capacity)],
    )


def _plot(lines: Lines) -> Plot:
    return Plot(
        title=Words("Requests in line", "排队的请求数"),
        x=Words("seconds", "秒"),
        y=Words("waiting", "等待数"),
        lines=lines,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("cold start, s", "冷启动（秒）"),
            Words("line foreseen", "预测队列长度"),
            Words("longest line", "最长队列"),
            Words("line gone, s after the start", "启动后多久消化完（秒）"),
        ],
        rows=rows,
    )


def _note(capacity: float) -> Words:
    return Words(
        f"One replica makes {capacity:.0f} requests a second. The line of a cold start lasts longer than the "
        f"start: with two replicas it shrinks by only {2 * capacity - AFTER:.0f} a second.",
        f"单副本每秒处理 {capacity:.0f} 个请求。队列持续的时间比冷启动更长：两个副本时每秒只消化 "
        f"{2 * capacity - AFTER:.0f} 个。",
    )


LAB = described(__file__, run)
