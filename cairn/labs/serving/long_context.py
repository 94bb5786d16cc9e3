"""From which length on is reading the context more work than reading the model?

    bytes of a decode step = weights + context x bytes of a token's keys and values

The two are equal at weights / KV bytes of a token. A sliding window stops the growth; the lab times attention over
longer and longer caches, and over a window.
"""

from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TYPE_CHECKING

from cairn.labs.interleaved_timing import fastest_in_turn
from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_bytes, cache_bytes_per_token
from cairn.models.presets import preset

if TYPE_CHECKING:
    from torch import Tensor

WINDOW = 1024
HEADS, KV_HEADS, SIZE = 8, 1, 64
AT_ONCE = 8192  # tokens of every timed call, so that a disturbance meets all lengths alike
UNCACHED = 64 << 20  # bytes that no cache of a core holds
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "mistral-7b-v0.1", "llama-3.1-70b")


def crossing(name: str) -> float:
    """Tokens at which keys and values of one sequence are as many bytes as the weights."""
    spec = preset(name)
    return spec.matmul_parameters() * 2 / cache_bytes_per_token(spec, 2)


@one_thread()
def run(bench: Workbench) -> Outcome:
    lengths = bench.pick((1024, 2048, 4096, 8192), (1024, 8192))
    bench.step(f"one token attends to {lengths[0]} to {lengths[-1]}")
    full, windowed = attention_us(lengths, bench.pick(200, 40))
    return Outcome(
        checks=[*_times(full, windowed), _window_rule(), _kept()],
        plots=[
            Plot(
                title=Words("One decoded token, one layer", "单 token、单层 attention"),
                x=Words("tokens of context", "上下文 token 数"),
                y=Words("microseconds", "微秒"),
                lines={"full": full, f"window of {WINDOW}": windowed},
                log_x=True,
                log_y=True,
            )
        ],
        table=_table(),
    )


def attention_us(lengths: Sequence[int], rounds: int) -> tuple[Points, Points]:
    """One query over caches of these lengths, and over the window at the end of each; all of them take turns."""
    import torch

    # The caches lie side by side in more bytes than a CPU's own cache holds, and none is read twice in a row.
    pool = torch.randn(2, UNCACHED // (2 * KV_HEADS * SIZE * 4), KV_HEADS, SIZE)
    calls = [_decode(pool, length, last) for length in lengths for last in (length, WINDOW)]
    read = [AT_ONCE // last for length in lengths for last in (length, WINDOW)]
    spent = fastest_in_turn(rounds, *calls)
    each_us = [seconds / count * 1e6 for seconds, count in zip(spent, read, strict=True)]
    at = [float(length) for length in lengths]
    return list(zip(at, each_us[::2], strict=True)), list(zip(at, each_us[1::2], strict=True))


def _decode(pool: "Tensor", length: int, last: int) -> Callable[[], None]:
    """A call that attends to the `last` tokens of the next few sequences of this length, AT_ONCE tokens in all."""
    import torch

    from cairn.models.attend import AttentionRule, attention

    rule = AttentionRule(layer=0, scale=SIZE**-0.5)
    q_1HC = torch.randn(1, HEADS, SIZE)
    ends = range(length, pool.shape[1] + 1, length)
    caches = cycle([pool[:, end - last : end].unbind() for end in ends])

    def decode() -> None:
        for keys, values in islice(caches, AT_ONCE // last):
            attention(q_1HC, keys, values, rule)

    return decode


def _times(full: Points, windowed: Points) -> list[Check]:
    (short, short_us), (long, long_us) = full[0], full[-1]
    return [
        Check(
            what=Words(
                f"attention at {long:.0f} tokens over {short:.0f}",
                f"{long:.0f} 与 {short:.0f} token 的 attention 时间之比",
            ),
            predicted=long / short,
            measured=long_us / short_us,
            unit="x",
            within=0.4,
        ),
        Check(
            what=Words("with a window, longest over shortest", "滑动窗口下最长与最短之比"),
            predicted=1.0,
            measured=windowed[-1][1] / windowed[0][1],
            unit="x",
            within=0.4,
        ),
    ]


def _window_rule() -> Check:
    """The model's rule of a window against attention that is given the last tokens alone."""
    import torch

    from cairn.models.attend import AttentionRule, attention

    q_1HC = torch.randn(1, HEADS, SIZE)
    k_NKC, v_NKC = torch.randn(2, 2 * WINDOW, KV_HEADS, SIZE).unbind()
    alone = attention(
        q_1HC, k_NKC[-WINDOW:], v_NKC[-WINDOW:], AttentionRule(layer=0, scale=SIZE**-0.5)
    )
    ruled = attention(q_1HC, k_NKC, v_NKC, AttentionRule(layer=0, scale=SIZE**-0.5, window=WINDOW))
    return Check(
        what=Words(
            "largest difference of the window's rule and of its tokens alone",
            "窗口规则与只取窗口内 token 的最大差异",
        ),
        predicted=1e-5,
        measured=float((alone - ruled).abs().max()),
        unit="",
        kind="at_most",
    )


def _kept() -> Check:
    """By formula: 4096 tokens, keys and values, 32 layers, 8 heads of 128, 2 bytes each."""
    return Check(
        what=Words(
            "KV of 32k tokens that Mistral's window of 4096 keeps",
            "Mistral 4096 窗口下 32k 上下文的 KV",
        ),
        predicted=4096 * 2 * 32 * 8 * 128 * 2 / 1e9,
        measured=cache_bytes(preset("mistral-7b-v0.1"), 32_768, 2) / 1e9,
        unit="GB",
    )


def _table() -> Table:
    rows = []
    for name in MODELS:
        spec = preset(name)
        rows.append(
            [
                name,
                cache_bytes_per_token(spec, 2) / 1024,
                crossing(name),
                cache_bytes(spec, 32_768, 2) / 1e9,
                spec.matmul_parameters() * 2 / 1e9,
            ]
        )
    return Table(
        columns=[
            Words("model", "模型"),
            Words("KV, KiB a token", "KV（KiB/token）"),
            Words("context at which KV = weights", "KV 等于权重时的上下文"),
            Words("KV of 32k tokens, GB", "32k 的 KV（GB）"),
            Words("weights, GB", "权重（GB）"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
