"""From which length on is reading the context more work than reading the model?

    bytes of a decode step = weights + context x bytes of a token's keys and values

The two are equal at weights / KV bytes of a token. A sliding window stops the growth; the lab times attention over
longer and longer caches, and over a window.
"""

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_bytes, cache_bytes_per_token
from cairn.models.presets import preset

WINDOW = 1024
HEADS, KV_HEADS, SIZE = 8, 1, 64
UNCACHED = 64 << 20  # bytes that no cache of a core holds
MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "mistral-7b-v0.1", "llama-3.1-70b")


def crossing(name: str) -> float:
    """Tokens at which keys and values of one sequence are as many bytes as the weights."""
    spec = preset(name)
    return spec.matmul_parameters() * 2 / cache_bytes_per_token(spec, 2)


@one_thread()
def run(bench: Workbench) -> Outcome:
    full, windowed = [], []
    for length in bench.pick((1024, 2048, 4096, 8192), (1024, 8192)):
        bench.step(f"one token attends to {length}")
        whole, part = attention_us(bench, length)
        full.append((float(length), whole))
        windowed.append((float(length), part))
    return Outcome(
        checks=[*_times(full, windowed), _kept()],
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


def attention_us(bench: Workbench, length: int) -> tuple[float, float]:
    """One query over a cache of this length, and over the window at its end; the two must agree with the rule."""
    import torch

    from cairn.models.attend import Rule, attention

    rule = Rule(layer=0, scale=SIZE**-0.5)
    q_1HC = torch.randn(1, HEADS, SIZE)
    # Several caches take turns, so that none of them stays in the CPU's own.
    copies = max(2, UNCACHED // (2 * length * KV_HEADS * SIZE * 4))
    pairs = [torch.randn(2, length, KV_HEADS, SIZE).unbind() for _ in range(copies)]
    k_NKC, v_NKC = pairs[0]
    seen = attention(q_1HC, k_NKC[-WINDOW:], v_NKC[-WINDOW:], rule)
    same = attention(q_1HC, k_NKC, v_NKC, Rule(layer=0, scale=SIZE**-0.5, window=WINDOW))
    assert torch.allclose(seen, same, atol=1e-5)

    def best(count: int) -> float:
        """The quick runs over so many tokens: whatever else the machine does only adds time."""
        given = [
            (q_1HC, keys[at : at + count], values[at : at + count], rule)
            for keys, values in pairs
            for at in range(0, length, count)
        ]
        looks = (bench.time(attention, given, device="cpu", budget_ms=40) for _ in range(4))
        return min(look.p10_s for look in looks) * 1e6

    return best(length), best(WINDOW)


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
