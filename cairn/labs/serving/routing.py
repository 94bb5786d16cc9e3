"""Four replicas, many conversations: does it matter who gets which request?

    round robin   every replica computes every conversation's prefix once: four copies of the cache
    affinity      a conversation returns to where its prefix is (rendezvous hash of the prefix)
    two choices   the less loaded of two random replicas: evens out load, knows nothing of caches

Each replica has the engine's own scheduler and prefix cache, so hits are counted and not assumed.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.workbench import Workbench

if TYPE_CHECKING:
    from cairn.labs.serving._fleet import Replica
    from cairn.serve.engine.request import Request

REPLICAS, PAGE, HEAD = 4, 16, 512
Requests = list[tuple[float, "Request"]]


def round_robin(replicas: "Sequence[Replica]", request: "Request", at: float) -> int:
    return int(request.id) % len(replicas)


def affinity(replicas: "Sequence[Replica]", request: "Request", at: float) -> int:
    """The replica with the highest hash together with the first page: a new replica takes over only its share."""
    first = str(request.prompt[:PAGE]).encode()
    marks = [
        hashlib.blake2b(first + bytes([i]), digest_size=8).digest() for i in range(len(replicas))
    ]
    return marks.index(max(marks))


def two_choices(replicas: "Sequence[Replica]", request: "Request", at: float) -> int:
    pair = random.Random(int(request.id)).sample(range(len(replicas)), 2)
    return min(pair, key=lambda i: replicas[i].load)


def conversations(count: int, turns: int) -> Requests:
    """Turns of conversations in a mixed order; each begins with its conversation's own 512 tokens."""
    from cairn.labs.serving._engine import ask, words

    draw = random.Random(2)
    order = [number % count for number in range(count * turns)]
    draw.shuffle(order)
    at, arrivals = 0.0, []
    for number, which in enumerate(order):
        at += draw.expovariate(40.0)
        arrivals.append(
            (at, ask(number, words(HEAD, 900, which) + words(24, 900, 10_000 + number), 16))
        )
    return arrivals


def run(bench: Workbench) -> Outcome:
    from cairn.labs.serving._fleet import Replica, serve, share_of, ttfts
    from cairn.serve.engine.request import Limits

    count, turns = bench.pick((40, 12), (20, 8))
    turns = bench.setting("turns", turns)
    limits = Limits(
        rows=32, step_tokens=2048, context=1024, pages=4000, page_size=PAGE, vocabulary=1000
    )
    rows, hits, spread = [], {}, {}
    for choose in (round_robin, two_choices, affinity):
        name = choose.__name__.replace("_", " ")
        bench.step(f"{count * turns} requests, {name}")
        replicas = [
            Replica(limits, lambda step: 2e-3 + 4e-5 * step.tokens) for _ in range(REPLICAS)
        ]
        arrivals = conversations(count, turns)
        chosen: Counter[int] = Counter()

        def counted(all_: "Sequence[Replica]", one: "Request", at: float) -> int:
            place = choose(all_, one, at)  # noqa: B023
            chosen[place] += 1  # noqa: B023
            return place

        serve(replicas, arrivals, counted)
        hits[name] = sum(r.scheduler.blocks.prefix.statistics.hits for r in replicas)
        first = ttfts(request for _, request in arrivals)
        spread[name] = max(chosen.values()) / (count * turns / REPLICAS)
        rows.append(
            [
                name,
                hits[name] / (count * turns * (HEAD + 24)),
                spread[name],
                share_of(first, 0.5) * 1e3,
                share_of(first, 0.99) * 1e3,
            ]
        )
    # t turns dealt to r replicas at random meet r (1 - (1 - 1/r)^t) of them, and each computes the prefix once.
    visited = REPLICAS * (1 - (1 - 1 / REPLICAS) ** turns)
    return Outcome(
        checks=_checks(count, turns, hits, visited, spread),
        table=Table(
            columns=[
                Words("router", "路由策略"),
                Words("share of prompt tokens found", "prompt token 命中率"),
                Words("busiest over mean", "最忙副本/平均"),
                Words("TTFT p50, ms", "TTFT p50（毫秒）"),
                Words("TTFT p99, ms", "TTFT p99（毫秒）"),
            ],
            rows=rows,
        ),
    )


def _checks(
    count: int, turns: int, hits: dict[str, int], met: float, spread: dict[str, float]
) -> list[Check]:
    return [
        Check(
            what=Words("tokens found with affinity", "亲和路由命中的 token 数"),
            predicted=count * (turns - 1) * HEAD,
            measured=hits["affinity"],
            unit="tokens",
        ),
        Check(
            what=Words("tokens found with round robin", "轮询命中的 token 数"),
            predicted=count * (turns - met) * HEAD,
            measured=hits["round robin"],
            unit="tokens",
            within=0.05,
        ),
        Check(
            what=Words(
                "busiest replica with two choices, over the mean", "二选一时最忙副本 / 平均"
            ),
            predicted=1.25,
            measured=spread["two choices"],
            unit="x",
            kind="at_most",
        ),
        Check(
            what=Words(
                "busiest replica with affinity, over with two choices",
                "亲和路由的最忙副本 / 二选一",
            ),
            predicted=1.0,
            measured=spread["affinity"] / spread["two choices"],
            unit="x",
            kind="at_least",
        ),
    ]


LAB = described(__file__, run)
