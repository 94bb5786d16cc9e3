"""A request lost its pages. Is it cheaper to copy its keys and values back, or to compute them again?

    swap        bytes of KV / bandwidth of the way to the other memory, there and back
    recompute   FLOPs of a prefill over what is known / matmul rate

Per token both are constants of model and machine (until attention's square shows), so one of the two wins for good. The
engine here recomputes; whether answers stay the same when that happens is tried with too few pages.
"""

from cairn.labs.lab import Check, Lab, Outcome, Plot, Question, Rows, Table, Words
from cairn.labs.one_thread import one_thread
from cairn.labs.serving._engine import (
    SMALL,
    TINY,
    ask,
    drain,
    host_rates,
    small_engine,
    words,
)  # fmt: skip
from cairn.labs.workbench import Workbench
from cairn.models.cache import cache_bytes

PCIE = 50e9  # bytes a second, pinned, PCIe 5 x16


def preempted_answers(pages: int) -> tuple[list[list[int]], int]:
    """Six requests through so many pages of 16: what they answered, and how often one lost its pages."""
    engine = small_engine(TINY, num_gpu_blocks_override=pages, enable_prefix_caching=False)
    asked = [ask(number, words(24, TINY.vocab, number), 40) for number in range(6)]
    drain(engine, asked)
    return [request.outputs for request in asked], engine.scheduler.preemptions


@one_thread()
def run(bench: Workbench) -> Outcome:
    rates = host_rates(bench)
    tokens = bench.pick(512, 128)
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

    kept = torch.randn(int(cache_bytes(SMALL, tokens, 4)) // 4)
    away, back = torch.empty_like(kept), torch.empty_like(kept)

    def swap() -> None:
        away.copy_(kept)
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


LAB = Lab(
    name="swap-recompute",
    area="serving",
    title=Words("Swap or recompute a lost KV cache", "KV 被抢占后：换页还是重算"),
    hypothesis=Words(
        "Both cost a constant per token, so a machine has a side: on a CPU, whose memory is far faster than its "
        "arithmetic, copying wins by more than ten; on an H200 over PCIe the two are within a factor of six. A "
        "preempted request ends with the same tokens.",
        "两者每 token 的代价都是常数，所以每种机器有固定的答案：CPU 的内存远快于算力，拷贝快十倍以上；H200 走 PCIe "
        "时两者相差不到六倍。被抢占的请求最终 token 不变。",
    ),
    run=run,
    causes=(
        Words(
            "a prompt of some hundred tokens does not reach the rate of large products",
            "几百 token 的 prompt 达不到大矩阵乘的速率",
        ),
        Words("the copy stayed in a cache", "拷贝的数据留在了缓存里"),
    ),
    code=(
        "cairn/serve/engine/scheduler.py:Scheduler",
        "cairn/serve/engine/block_manager.py:BlockManager",
        "cairn/models/spec.py:ModelSpec",
    ),
    reading=(
        "Efficient Memory Management for Large Language Model Serving with PagedAttention (2023)",
    ),
    questions=(
        Question(
            Words("Who is preempted, and why that one?", "抢占谁？为什么？"),
            Words(
                "The last of the running: least urgent, latest arrival. It has lost least work, and the oldest "
                "always gets on, so nobody starves.",
                "运行队列的最后一个：优先级最低、最晚到达。它损失的工作最少，最老的总能推进，没有人会饿死。",
            ),
        ),
        Question(
            Words("How does the prefix cache change recompute?", "前缀缓存如何改变重算的代价？"),
            Words(
                "Freed pages stay findable until they are needed for something else; a request that returns soon "
                "finds most of its own pages and recomputes only the rest.",
                "释放的页在被别人占用前仍可被找到；很快回来的请求能命中自己的大部分页，只需重算其余部分。",
            ),
        ),
        Question(
            Words(
                "Preemptions show up in production. What do you change first?",
                "线上出现抢占，先改什么？",
            ),
            Words(
                "Fewer rows at once, or more pages (fp8 KV, more tensor parallel, shorter max length). Preemption "
                "means more was admitted than can finish.",
                "减少并发行数，或增加页（fp8 KV、更大的 TP、缩短最大长度）。抢占意味着放进来的请求多于能完成的。",
            ),
        ),
    ),
    seconds=5.0,
)
