"""How good are a learner's predictions? Each lab that was predicted first, as a factor from the measured value.

    1.0 exact    2.0 twice too large or half of it    the median over time should fall

Pure: reads entries of the lab record, prints nothing.
"""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from cairn.labs.entry import Entry, Guess
from cairn.labs.figures import figure
from cairn.labs.lab import Words

GOOD, CLOSE = 1.25, 2.0
RECENT = 5  # the newest ones are set against all before them


class PredictionAccuracy(NamedTuple):
    count: int
    median: float  # factor of all predictions
    within_two: float  # share that is at most twice off
    recent: float | None  # median of the newest; None while there are too few to compare


def foresight(entries: Sequence[Entry]) -> PredictionAccuracy | None:
    """Over all predictions that a factor could be given, oldest first; None where there is none."""
    factors = [
        entry.guess.factor
        for entry in entries
        if entry.guess is not None and entry.guess.factor is not None
    ]
    if not factors:
        return None
    recent = median(factors[-RECENT:]) if len(factors) >= 2 * RECENT else None
    within = sum(factor <= CLOSE for factor in factors) / len(factors)
    return PredictionAccuracy(len(factors), median(factors), within, recent)


def said_guess(guess: Guess) -> Words:
    """Your 12 against 10.2: 1.2x off."""
    if guess.factor is None or guess.measured is None:
        return Words(
            f"you said {figure(guess.value)} {guess.unit}: not comparable with what was measured",
            f"你的预测 {figure(guess.value)} {guess.unit}：与实测不可比",
        )
    word = (
        Words("good", "不错")
        if guess.factor <= GOOD
        else Words("close", "接近")
        if guess.factor <= CLOSE
        else Words("far off: read why below", "差得远：看下面的原因")
    )
    return Words(
        f"you said {figure(guess.value)}, measured {figure(guess.measured)} {guess.unit}: "
        f"{guess.factor:.2f}x off, {word.en}",
        f"你预测 {figure(guess.value)}，实测 {figure(guess.measured)} {guess.unit}："
        f"相差 {guess.factor:.2f} 倍，{word.zh}",
    )


def said(foresight: PredictionAccuracy) -> Words:
    trend = Words("", "")
    if foresight.recent is not None:
        trend = Words(
            f"; the last {RECENT}: {foresight.recent:.2f}x",
            f"；最近 {RECENT} 次：{foresight.recent:.2f} 倍",
        )
    return Words(
        f"your predictions: {foresight.count}, median {foresight.median:.2f}x off, "
        f"{foresight.within_two:.0%} within 2x{trend.en}",
        f"你的预测：{foresight.count} 次，中位数相差 {foresight.median:.2f} 倍，"
        f"{foresight.within_two:.0%} 在 2 倍以内{trend.zh}",
    )
