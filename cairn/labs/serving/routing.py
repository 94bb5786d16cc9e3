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

from cairn.labs.lab import Check, Lab, Outcome, Question, Table, Words
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
    at, made = 0.0, []
    for number, which in enumerate(order):
        at += draw.expovariate(40.0)
        made.append(
            (at, ask(number, words(HEAD, 900, which) + words(24, 900, 10_000 + number), 16))
        )
    return made


def run(bench: Workbench) -> Outcome:
    from cairn.labs.serving._fleet import Replica, serve, share_of, ttfts
    from cairn.serve.engine.request import Limits

    count, turns = bench.pick((40, 12), (20, 8))
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
        made = conversations(count, turns)
        chosen: Counter[int] = Counter()

        def counted(all_: "Sequence[Replica]", one: "Request", at: float) -> int:
            place = choose(all_, one, at)  # noqa: B023
            chosen[place] += 1  # noqa: B023
            return place

        serve(replicas, made, counted)
        hits[name] = sum(r.scheduler.blocks.prefix.statistics.hits for r in replicas)
        first = ttfts(request for _, request in made)
        spread[name] = max(chosen.values()) / (count * turns / REPLICAS)
        rows.append([name, hits[name] / (count * turns * (HEAD + 24)), spread[name],
                     share_of(first, 0.5) * 1e3, share_of(first, 0.99) * 1e3])  # fmt: skip
    # t turns dealt to r replicas at random meet r (1 - (1 - 1/r)^t) of them, and each computes the prefix once.
    met = REPLICAS * (1 - (1 - 1 / REPLICAS) ** turns)
    return Outcome(
        checks=_checks(count, turns, hits, met, spread),
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


LAB = Lab(
    name="routing",
    area="serving",
    title=Words("Routing: load against cache", "路由：负载与缓存的权衡"),
    hypothesis=Words(
        "With affinity all turns but the first find their prefix; dealt out blindly, a conversation of t turns "
        "computes its prefix r (1 - (1 - 1/r)^t) times on r replicas. Affinity pays with a less even load.",
        "亲和路由下除首轮外全部命中；盲目分发时，t 轮对话在 r 个副本上要计算前缀 r(1-(1-1/r)^t) 次。"
        "亲和的代价是负载更不均。",
    ),
    run=run,
    causes=(
        Words("a replica ran out of pages and forgot prefixes", "某个副本的页用完，淘汰了前缀"),
        Words(
            "few conversations: the hash happens to spread them evenly, or badly",
            "会话太少，哈希恰好分得很匀或很偏",
        ),
    ),
    code=(
        "cairn/serve/engine/prefix_cache.py:PrefixCache",
        "cairn/serve/engine/scheduler.py:Scheduler",
        "cairn/labs/serving/_fleet.py:serve",
    ),
    reading=(
        "The Power of Two Choices in Randomized Load Balancing (2001)",
        "SGLang: Efficient Execution of Structured Language Model Programs (2023)",
        "Preble: Efficient Distributed Prompt Scheduling for LLM Serving (2024)",
    ),
    questions=(
        Question(
            Words(
                "One conversation is very hot. What does a good router do?",
                "某个前缀非常热，好的路由器会怎么做？",
            ),
            Words(
                "Affinity with a limit: when the owner's load exceeds the mean by a factor (1.25, say), the next "
                "one in hash order takes it and computes the prefix once (bounded-load consistent hashing).",
                "带上限的亲和：当主副本负载超过平均的一定倍数（如 1.25），按哈希顺序交给下一个副本并计算一"
                "次前缀（有界负载一致性哈希）。",
            ),
        ),
        Question(
            Words(
                "Why two random choices and not the least loaded of all?",
                "为什么随机选两个，而不是选全局最空闲的？",
            ),
            Words(
                "Load reports are old; all routers would send to the same replica until the next report. Two "
                "choices take the longest queue from log n to log log n without a herd.",
                "负载信息有延迟，所有路由器会同时涌向同一副本。二选一把最长队列从 log n 降到 log log n，"
                "又不会羊群效应。",
            ),
        ),
        Question(
            Words(
                "What load figure should a router look at for language models?",
                "LLM 路由应看什么负载指标？",
            ),
            Words(
                "Not requests: tokens still to prefill, running rows, and free pages. One 30k prompt is worth a "
                "hundred chats.",
                "不是请求数，而是待 prefill 的 token 数、运行行数和空闲页。一个 30k 的 prompt 抵得上上百个聊天请求。",
            ),
        ),
    ),
    seconds=4.0,
)
