"""Draft-length controller: acceptance rates and a cost model in, draft counts out. Pure.

    drafts of a request at chance a         1 + a + a^2 + .. + a^k tokens are expected of it
    a step of so many tokens                takes seconds(tokens)
    chosen                                  what gives most expected tokens per second, over all requests together

The n-th draft of a request is expected to bring a^n tokens, in every request. Where a step costs what its tokens
cost, the best set of so many drafts is that of the largest gains, so one pass over the sorted gains finds the optimum.
Where steps are padded to uniform rows (CUDA graphs), a width is chosen for all, and drafts within it are free.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Seconds = Callable[[int], float]  # of a step with so many tokens
LEAST_GAIN = 1.02  # drafts that are expected to bring less are not worth their risk


class Prospect(NamedTuple):
    """A decoding request, and what was proposed for it."""

    chance: float  # that a draft holds, if those before it do
    proposed: int


def choose_drafts(
    prospects: Sequence[Prospect], seconds: Seconds, widths: Sequence[int] = (), wait_s: float = 0.0
) -> list[int]:
    """Drafts of each request. `widths`: tokens that padded rows may have, ascending from 1; none: rows are not padded.

    `wait_s`: what a step with drafts takes longer, because the next one waits for it.
    """
    if not prospects:
        return []
    rows = len(prospects)
    plain = rows / seconds(rows)

    def verifying(tokens: int) -> float:
        return seconds(tokens) + (wait_s if tokens > rows else 0.0)

    choose = _padded if widths else _packed
    chosen, rate = choose(prospects, verifying, widths)
    return chosen if rate >= LEAST_GAIN * plain else [0] * rows


def expected(chance: float, drafts: int) -> float:
    """Tokens that a request is expected to get from a step with so many drafts, the one always drawn included."""
    return drafts + 1.0 if chance >= 1 else (1 - chance ** (drafts + 1)) / (1 - chance)


def _packed(
    prospects: Sequence[Prospect], seconds: Seconds, widths: Sequence[int]
) -> tuple[list[int], float]:
    """The best prefix of all drafts, sorted by what they are expected to bring."""
    rows = len(prospects)
    gains = sorted(
        ((p.chance**n, -n, at) for at, p in enumerate(prospects) for n in range(1, p.proposed + 1)),
        reverse=True,
    )
    total, best, best_rate = float(rows), 0, rows / seconds(rows)
    for count, (gain, _, _) in enumerate(gains, start=1):
        total += gain
        rate = total / seconds(rows + count)
        if rate > best_rate:
            best, best_rate = count, rate
    chosen = [0] * rows
    for _, _, at in gains[:best]:
        chosen[at] += 1
    return chosen, best_rate


def _padded(
    prospects: Sequence[Prospect], seconds: Seconds, widths: Sequence[int]
) -> tuple[list[int], float]:
    """The best width; one more than the longest proposal is not better."""
    rows, best, best_rate = len(prospects), [0] * len(prospects), 0.0
    for width in widths:
        drafts = [min(p.proposed, width - 1) for p in prospects]
        total = sum(expected(p.chance, n) for p, n in zip(prospects, drafts, strict=True))
        rate = total / seconds(rows * width)
        if rate > best_rate:
            best, best_rate = drafts, rate
        if width > 1 + max(p.proposed for p in prospects):
            break
    return best, best_rate
