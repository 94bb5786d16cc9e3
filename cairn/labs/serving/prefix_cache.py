"""What is a common beginning worth?

    system prompt (P tokens) + question 1        computed whole
    system prompt (P tokens) + question 2        finds the full pages of P, computes the rest

How many tokens are found is exact: all full pages of the common part, for everybody but the first.
"""

from typing import NamedTuple

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import SMALL, ask, drain, small_engine, words
from cairn.labs.workbench import Workbench
from cairn.models.step_cost import SequenceWork, step_cost

PAGE = 16


class Served(NamedTuple):
    seconds: float  # to the first tokens, all requests together
    answers: list[list[int]]
    hits: int  # tokens that were found


@one_thread()
def run(bench: Workbench) -> Outcome:
    requests, shared, own = bench.pick((6, 200, 24), (4, 100, 16))
    shared = bench.setting("shared", shared)
    head = words(shared, SMALL.vocab, 0)
    prompts = [head + words(own, SMALL.vocab, number + 1) for number in range(requests)]
    bench.step(f"{requests} requests, prefix caching off and on")
    off, on = served(prompts)
    foreseen = (requests - 1) * (shared // PAGE) * PAGE
    same = sum(a == b for a, b in zip(off.answers, on.answers, strict=True))
    return Outcome(
        checks=[
            *_exact(foreseen, on.hits, requests, same),
            Check(
                what=Words("gain in time to the first token", "首 token 时间的收益"),
                predicted=foreseen_gain(requests, shared, own),
                measured=off.seconds / on.seconds,
                unit="x",
                within=0.5,
            ),
        ],
        table=_table(requests * (shared + own), off, on),
        notes=[_note(shared)],
    )


def served(prompts: list[list[int]]) -> list[Served]:
    """Through two fresh engines, without and with the cache: in turn, so that what else runs here meets both."""
    engines = [
        small_engine(SMALL, enable_prefix_caching=caching, block_size=PAGE)
        for caching in (False, True)
    ]
    requests_of = [
        [ask(number, prompt, 4) for number, prompt in enumerate(prompts)] for _ in engines
    ]
    for engine in engines:
        drain(engine, [ask(1000, words(32, SMALL.vocab, 99), 2)])
    for pair in zip(*requests_of, strict=True):
        for engine, request in zip(engines, pair, strict=True):
            drain(engine, [request])
    return [
        Served(
            seconds=sum(one.ledger.first_token - one.ledger.arrived for one in requests),
            answers=[one.outputs for one in requests],
            hits=engine.scheduler.blocks.prefix.statistics.hits,
        )
        for engine, requests in zip(engines, requests_of, strict=True)
    ]


def foreseen_gain(requests: int, shared: int, own: int) -> float:
    """By FLOPs: all prompts whole, over the first whole and of the others what is not found."""
    cached = shared // PAGE * PAGE
    whole = step_cost(SMALL, [SequenceWork(shared + own, 0)], 4).flops
    rest = step_cost(SMALL, [SequenceWork(shared + own - cached, cached)], 4).flops
    return requests * whole / (whole + (requests - 1) * rest)


def _exact(foreseen: int, hits: int, requests: int, same: int) -> list[Check]:
    return [
        Check(
            what=Words("tokens found in the cache", "命中的 token 数"),
            predicted=foreseen,
            measured=hits,
            unit="tokens",
        ),
        Check(
            what=Words("answers that are the same with and without", "开关缓存后回答相同的个数"),
            predicted=requests,
            measured=same,
            unit="answers",
        ),
    ]


def _table(tokens: int, off: Served, on: Served) -> Table:
    return Table(
        columns=[
            Words("prefix caching", "前缀缓存"),
            Words("tokens computed", "计算的 token 数"),
            Words("seconds to first tokens", "首 token 秒数"),
        ],
        rows=[["off", tokens, off.seconds], ["on", tokens - on.hits, on.seconds]],
    )


def _note(shared: int) -> Words:
    return Words(
        f"{shared} common tokens are {shared // PAGE} full pages of {PAGE}; the {shared % PAGE} tokens "
        "behind them are in a page that is not full, has no hash and is never shared.",
        f"{shared} 个公共 token 是 {shared // PAGE} 个满页；之后的 {shared % PAGE} 个 token 所在的页没满，"
        "没有哈希，不会共享。",
    )


LAB = described(__file__, run)
