"""A request lost its pages. Is it cheaper to copy its keys and values back, or to compute them again?

    swap        bytes of KV / bandwidth of the way to the other memory, there and back
    recompute   FLOPs of a prefill over what is known / matmul rate

Per token both are constants of model and machine (until attention's square shows), so one of the two wins for good. The
engine here recomputes; whether answers stay the same when that happens is tried with too few pages.
"""

from cairn.labs.lab import Check, Outcome, Plot, Rows, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import (
    SMALL,
    TINY,
    ask,
    drain,
    host_rates,
    small_engine,
    words,
)
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_bytes

PCIE = 50e9  # bytes a second, pinned, PCIe 5 x16


def preempted_answers(pages: int) -> tuple[list[list[int]], int]:
    """Six requests through so many pages of 16: what they answered, and how often one lost its pages."""
    engine = small_engine(TINY, num_gpu_blocks_override=pages, enable_prefix_caching=False)
    requests = [ask(number, words(24, TINY.vocab, number), 40) for number in range(6)]
    drain(engine, requests)
    return [request.outputs for request in requests], engine.scheduler.queues.preemptions


@one_thread()
def run(bench: Workbench) -> Outcome:
    rates = host_rates(bench)
    tokens = bench.setting("tokens", bench.pick(512, 128))
    bench.step(f"recomputing {tokens} tokens")
    engine = small_engine(SMALL, enable_prefix_caching=False)
    drain(engine, [ask(0, words(tokens, SMALL.vocab, 0), 1)])
    again = min(drain(engine, [ask(n, words(tokens, SMALL.vocab, n), 1)]) for n in (1, 2))
    foreseen = SMALL.forward_flops(tokens, 0, 1) / rates.flops_per_s
    bench.step("copying the same keys and values out and back")
    moved = swap_s(bench, tokens)
    bench.step("an engine with too few pages")
    plenty, none = preempted_answers(64)
    scarce, times = preempted_answers(12)
    changed = sum(a != b for a, b in zip(plenty, scarce, strict=True))
    rows = large_model()
    return Outcome(
        checks=[*_preempted(none, times, changed), *_times(foreseen, again, moved)],
        plots=[_plot(rows)],
        table=_table(rows),
    )


def swap_s(bench: Workbench, tokens: int) -> float:
    """Seconds to copy the keys and values of so many tokens elsewhere and back."""
    import torch

    on_device = torch.randn(int(cache_bytes(SMALL, tokens, 4)) // 4)
    away, back = torch.empty_like(on_device), torch.empty_like(on_device)

    def swap() -> None:
        away.copy_(on_device)
        back.copy_(away)

    return bench.time(swap, device="cpu").median_s


def large_model() -> list[tuple[int, float, float, float]]:
    """Tokens, milliseconds to swap and to recompute, and their ratio: an 8B model on one H200, by formula."""
    from cairn.models.presets import preset
    from cairn.plan.device import device

    large, h200 = preset("qwen3-8b"), device("h200")
    rows = []
    for length in (256, 1024, 4096, 16384, 32768):
        by_copy = 2 * cache_bytes(large, length, 2) / PCIE * 1e3
        by_work = large.forward_flops(length, 0, 1) / h200.flops_per_s * 1e3
        rows.append((length, by_copy, by_work, by_work / by_copy))
    return rows


def _preempted(none: int, times: int, changed: int) -> list[Check]:
    return [
        Check(
            what=Words("preemptions with plenty of pages", "页充足时的抢占次数"),
            predicted=0,
            measured=none,
            unit="",
        ),
        Check(
            what=Words("preemptions with 12 pages, at least", "只有 12 页时的抢占次数（至少）"),
            predicted=1,
            measured=times,
            unit="",
            kind="at_least",
        ),
        Check(
            what=Words("answers that a preemption has changed", "被抢占改变的回答数"),
            predicted=0,
            measured=changed,
            unit="answers",
        ),
    ]


def _times(foreseen: float, again: float, moved: float) -> list[Check]:
    return [
        Check(
            what=Words("time to recompute, at least", "重算时间（至少）"),
            predicted=foreseen * 1e3,
            measured=again * 1e3,
            unit="ms",
            kind="at_least",
            within=0.4,
        ),
        Check(
            what=Words("recompute over swap, on this CPU", "本机上重算与拷贝之比"),
            predicted=10,
            measured=again / moved,
            unit="x",
            kind="at_least",
        ),
    ]


def _plot(rows: list[tuple[int, float, float, float]]) -> Plot:
    return Plot(
        title=Words("An 8B model on one H200", "H200 上的 8B 模型"),
        x=Words("tokens that lost their pages", "失去页的 token 数"),
        y=Words("milliseconds", "毫秒"),
        lines={
            "swap over PCIe": [(float(length), by_copy) for length, by_copy, _, _ in rows],
            "recompute": [(float(length), by_work) for length, _, by_work, _ in rows],
        },
        log_x=True,
        log_y=True,
    )


def _table(rows: Rows) -> Table:
    return Table(
        columns=[
            Words("tokens", "token 数"),
            Words("8B on H200: swap out and in, ms", "8B/H200：换出换入（毫秒）"),
            Words("recompute, ms", "重算（毫秒）"),
            Words("recompute over swap", "重算 / 换页"),
        ],
        rows=rows,
    )


LAB = described(__file__, run)
