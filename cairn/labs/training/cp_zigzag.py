"""Who has the most work when a long sequence is cut over ranks? The last one, unless the cut is a zigzag.

    causal: token t sees t + 1 keys
    contiguous    rank 0: chunks 0 1     rank 1: chunks 2 3      the last rank has up to twice the mean
    zigzag        rank 0: chunks 0 3     rank 1: chunks 1 2      everybody the same

Pairs of (query, key) are counted exactly; then each rank's attention is timed by itself; then the ring trains on two
real ranks, and its gradients are those of one process.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.labs.lab import Check, Outcome, Plot, Points, Table, Words, described
from cairn.labs.one_thread import one_thread
from cairn.labs.ranks import run_ranks
from cairn.labs.training._spread import Setting, alone, difference, on_ranks, tiny
from cairn.labs.workbench import Workbench
from cairn.train.parallel.layout import Layout

if TYPE_CHECKING:
    import torch


def contiguous_excess(ranks: int) -> float:
    """Pairs of the last rank over the mean, for a long sequence cut into equal stretches."""
    return 2 - 1 / ranks


def pairs(tokens: int, ranks: int, zigzag: bool) -> list[int]:
    """How many keys the queries of each rank see."""
    from cairn.train.parallel.context import indices

    kind = "ring" if zigzag else "ulysses"  # ulysses keeps tokens in contiguous stretches
    return [int((indices(tokens, rank, ranks, kind) + 1).sum()) for rank in range(ranks)]


@one_thread()
def run(bench: Workbench) -> Outcome:
    rows, cut, woven = [], [], []
    worst = 0.0
    for ranks in (2, 4, 8, 16):
        tokens = 32 * 1024
        straight, zigzag = (pairs(tokens, ranks, one) for one in (False, True))
        mean = sum(straight) / ranks
        worst = max(worst, max(zigzag) / mean - 1)
        cut.append((float(ranks), max(straight) / mean))
        woven.append((float(ranks), max(zigzag) / mean))
        rows.append([ranks, contiguous_excess(ranks), max(straight) / mean, max(zigzag) / mean])
    bench.step("attention of the busiest rank, timed")
    expected, measured = _attention(bench)
    setting = Setting(tiny(), Layout(cp=2), steps=1, per_step=2, tokens=32)
    bench.step("ring attention on two real ranks")
    apart = difference(run_ranks(2, on_ranks, setting), alone(setting))
    return Outcome(
        checks=_checks(worst, cut, expected, measured, apart),
        plots=[
            Plot(
                title=Words("Work of the busiest rank", "最忙 rank 的工作量"),
                x=Words("ranks", "rank 数"),
                y=Words("times the mean", "均值的倍数"),
                lines={"contiguous": cut, "zigzag": woven},
                log_x=True,
                limit=("balanced", 1.0),
            )
        ],
        table=Table(
            columns=[
                Words("ranks", "rank 数"),
                Words("predicted, contiguous", "连续切分预测"),
                Words("contiguous", "连续切分"),
                Words("zigzag", "zigzag"),
            ],
            rows=rows,
        ),
    )


def _checks(
    worst: float, cut: Points, expected: float, measured: float, apart: float
) -> list[Check]:
    return [
        Check(
            what=Words(
                "zigzag: most loaded rank over the mean, less one",
                "zigzag：最忙 rank 超出均值的比例",
            ),
            predicted=0.0,
            measured=worst,
            unit="share",
        ),
        Check(
            what=Words("contiguous, 16 ranks: most over mean", "连续切分 16 rank：最忙与均值之比"),
            predicted=contiguous_excess(16),
            measured=cut[-1][1],
            unit="x",
            within=0.01,
        ),
        Check(
            what=Words(
                "attention time, contiguous over zigzag, 4 ranks",
                "4 rank：连续切分与 zigzag 的注意力耗时比",
            ),
            predicted=expected,
            measured=measured,
            unit="x",
            within=0.35,
        ),
        Check(
            what=Words("ring on two ranks against one process", "两 rank 环形注意力与单进程的差异"),
            predicted=1e-5,
            measured=apart,
            unit="",
            kind="at_most",
        ),
    ]


def _attention(bench: Workbench) -> tuple[float, float]:
    """Contiguous over zigzag for the busiest of four ranks: keys that its blocks of queries see, and best times."""
    import torch

    from cairn.train.parallel.context import indices

    ranks, tokens, heads, width = 4, 2048, 2, 64
    height = tokens // (4 * ranks)
    k, v = torch.randn(heads, tokens, width), torch.randn(heads, tokens, width)
    q = torch.randn(heads, height, width)
    straight = _seen(indices(tokens, ranks - 1, ranks, "ulysses").split(height))
    zigzag = _seen(indices(tokens, 0, ranks, "ring").split(height))

    def attend(keys: list[int]) -> float:
        began = time.perf_counter()
        for length in keys:
            torch.softmax(q @ k[:, :length].transpose(1, 2), dim=-1) @ v[:, :length]
        return time.perf_counter() - began

    times = [(attend(straight), attend(zigzag)) for _ in range(bench.pick(12, 6))]
    measured = min(one for one, _ in times) / min(two for _, two in times)
    return sum(straight) / sum(zigzag), measured


def _seen(blocks: "Sequence[torch.Tensor]") -> list[int]:
    """Keys up to the last query of each block."""
    return [int(block[-1]) + 1 for block in blocks]


LAB = described(__file__, run)
