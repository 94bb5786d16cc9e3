"""Prefill and decode on one engine, or each on its own: who pauses, and what does moving the cache cost?

    together   one engine: prompts and answers share every step
    apart      prefill engine --KV pages--> decode engine: an answer is never paused by a prompt

The interference comes from the real scheduler on a trace (an 8B model on H200s, by the planner's cost of a step); the
hand-over happens between two real engines with different page sizes, and must not change a token.
"""

import random

from cairn.labs.lab import Check, Outcome, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import SMALL, ask, drain, small_engine, words
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_bytes

PROMPT, OUTPUT = 4096, 64
LINK = 50e9  # bytes a second: one 400 Gb/s NIC


def trace(count: int, rate: float, prompt: int, outputs: int) -> list[tuple[float, list[int], int]]:
    draw = random.Random(11)
    at, arrivals = 0.0, []
    for number in range(count):
        at += draw.expovariate(rate)
        arrivals.append((at, [number % 50 + 1] + [7] * (prompt - 1), outputs))
    return arrivals


def tpots(count: int, rate: float, prompt: int, prefix: bool) -> list[float]:
    """Time between tokens of each answer; `prefix`: the prompt is there already, as on a decode engine."""
    from cairn.models.presets import preset
    from cairn.plan.device import device
    from cairn.plan.serve_cost import Served, step_seconds
    from cairn.serve.engine.request import Limits
    from cairn.serve.engine.step import Step
    from cairn.serve.simulate import Arrival, simulate

    served = Served(spec=preset("qwen3-8b"), device=device("h200"))
    cost = step_seconds(served)
    moved_in = cache_bytes(served.spec, prompt, 2) / served.device.bytes_per_s if prefix else 0.0

    def seconds(step: Step) -> float:
        return cost(step) + moved_in * len(step.chunks)  # keys and values that came from elsewhere

    limits = Limits(
        rows=256, step_tokens=16384, context=8192, pages=8000, page_size=64, vocabulary=1000
    )
    # On a decode engine the prompt's pages have been moved in: only its last token is computed.
    arrivals = [
        Arrival(at, ask(n, tokens[:1] if prefix else tokens, outputs))
        for n, (at, tokens, outputs) in enumerate(trace(count, rate, prompt, OUTPUT))
    ]
    result = simulate(arrivals, limits, seconds, prefix_caching=False)
    return sorted(outcome.tpot or 0.0 for outcome in result.outcomes)


def hand_over(prompts: list[list[int]], outputs: int) -> tuple[int, int, float]:
    """Real engines, pages of 16 on one side and of 64 on the other: bytes, answers that differ, seconds moving."""
    from cairn.serve.engine.sampling_params import SamplingParams
    from cairn.serve.separation.decode import DecodeSide
    from cairn.serve.separation.pair import Separated
    from cairn.serve.separation.prefill import Ask, PrefillSide

    whole = [ask(number, prompt, outputs) for number, prompt in enumerate(prompts)]
    drain(small_engine(SMALL), whole)
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    asks = [
        Ask(id=str(number), prompt=prompt, params=params) for number, prompt in enumerate(prompts)
    ]
    prefill = PrefillSide(small_engine(SMALL, block_size=16), transport="shm")
    decode = DecodeSide(
        small_engine(SMALL, block_size=64, num_gpu_blocks_override=64), transport="shm"
    )
    with Separated(prefill, decode) as pair:
        answers = pair.generate(asks)
    arrived = [answer.arrival for answer in answers if answer.arrival is not None]
    differ = sum(answer.tokens != one.outputs for answer, one in zip(answers, whole, strict=True))
    return sum(one.bytes for one in arrived), differ, sum(one.moved_s for one in arrived)


@one_thread()
def run(bench: Workbench) -> Outcome:
    count, rate = bench.pick((300, 5.0), (80, 5.0))
    bench.step("prefill and decode in one engine")
    together = tpots(count, rate, PROMPT, prefix=False)
    bench.step("a decode engine of its own")
    apart = tpots(count, rate, PROMPT, prefix=True)
    count, tokens, outputs = bench.pick((3, 300, 16), (2, 100, 6))
    bench.step(f"{count} prompts of {tokens} tokens from one engine to another")
    prompts = [words(tokens, SMALL.vocab, number) for number in range(count)]
    moved, differ, seconds = hand_over(prompts, outputs)
    return Outcome(
        checks=[
            *_handed_over(count * cache_bytes(SMALL, tokens, 4), moved, differ),
            *_paces(together, apart),
            _price(),
        ],
        table=_table(together, apart),
        notes=[
            Words(
                f"Here {moved / 1e6:.1f} MB of keys and values went from pages of 16 to pages of 64 through shared "
                f"memory, at {moved / max(seconds, 1e-9) / 1e9:.2f} GB/s with the wait for its turn.",
                f"本机把 {moved / 1e6:.1f} MB 的 KV 经共享内存从 16 的页搬到 64 的页，含等待为 "
                f"{moved / max(seconds, 1e-9) / 1e9:.2f} GB/s。",
            )
        ],
    )


def _handed_over(expected: float, moved: int, differ: int) -> list[Check]:
    return [
        Check(
            what=Words("bytes of the hand-over", "移交的字节数"),
            predicted=expected,
            measured=moved,
            unit="B",
        ),
        Check(
            what=Words("answers that differ from one engine's", "与单引擎不同的回答数"),
            predicted=0,
            measured=differ,
            unit="answers",
        ),
    ]


def _paces(together: list[float], apart: list[float]) -> list[Check]:
    """The weights once, and the keys and values of one request: what a decode step reads at least."""
    from cairn.models.presets import preset
    from cairn.plan.device import device

    spec = preset("qwen3-8b")
    step = (spec.matmul_parameters() * 2 + cache_bytes(spec, PROMPT, 2)) / device(
        "h200"
    ).bytes_per_s
    return [
        Check(
            what=Words(
                "time between tokens on a decode engine, median", "独立 decode 引擎的 TPOT 中位数"
            ),
            predicted=step * 1e3,
            measured=_middle(apart) * 1e3,
            simulated=True,
            unit="ms",
            within=0.4,
        ),
        Check(
            what=Words("p99 between tokens, together over apart", "TPOT p99：合并 / 分离"),
            predicted=2.0,
            measured=_p99(together) / _p99(apart),
            simulated=True,
            unit="x",
            kind="at_least",
        ),
    ]


def _price() -> Check:
    """By formula: bytes over a link beside FLOPs over a GPU."""
    from cairn.models.presets import preset
    from cairn.plan.device import device

    spec, h200 = preset("qwen3-8b"), device("h200")
    prefill = spec.forward_flops(PROMPT, 0, 1) / h200.flops_per_s
    return Check(
        what=Words(
            "hand-over of a 4k prompt over its prefill", "4k prompt 的移交时间 / prefill 时间"
        ),
        predicted=0.2,
        measured=cache_bytes(spec, PROMPT, 2) / LINK / prefill,
        simulated=True,
        unit="x",
        kind="at_most",
    )


def _table(together: list[float], apart: list[float]) -> Table:
    from cairn.models.presets import preset

    moving = cache_bytes(preset("qwen3-8b"), PROMPT, 2) / LINK
    return Table(
        columns=[
            Words("8B on H200, 5 requests/s of 4k + 64", "8B/H200，5 请求/秒，4k + 64"),
            Words("TPOT p50, ms", "TPOT p50（毫秒）"),
            Words("TPOT p99, ms", "TPOT p99（毫秒）"),
            Words("hand-over at 50 GB/s, ms", "50 GB/s 下移交（毫秒）"),
        ],
        rows=[
            ["together", _middle(together) * 1e3, _p99(together) * 1e3, 0.0],
            ["apart", _middle(apart) * 1e3, _p99(apart) * 1e3, moving * 1e3],
        ],
    )


def _middle(ordered: list[float]) -> float:
    return ordered[len(ordered) // 2]


def _p99(ordered: list[float]) -> float:
    return ordered[int(0.99 * len(ordered))]


LAB = described(__file__, run)
