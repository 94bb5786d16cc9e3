"""95% confidence intervals of scores, by the method that fits the score. Pure numpy.

    a share of right answers     Wilson's interval: holds for few documents and for 0% and 100%
    a ratio of two sums          percentile bootstrap over documents or windows, a fixed seed, 1,000 draws

The standard error beside it is the one that lm-eval prints: the sample's deviation / sqrt(documents).
"""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

Z95 = 1.959963984540054
DRAWS = 1000


class ScoreMetric(msgspec.Struct, frozen=True, kw_only=True):
    value: float
    low: float
    high: float
    method: str  # of the interval: wilson, bootstrap, or none where one value has none
    stderr: float | None = None

    def shown(self) -> str:
        return _shown(self.value)

    def interval(self) -> str:
        """Format the interval with its method; empty if there is none."""
        if self.method == "none":
            return ""
        return f"{_shown(self.low)} to {_shown(self.high)}  ({self.method})"


def _shown(value: float) -> str:
    """Four digits behind the point; a perplexity of a billion has no use for them."""
    return f"{value:.4f}" if abs(value) < 1e5 else f"{value:.4g}"


def share(outcomes: Sequence[float]) -> ScoreMetric:
    """Mean of outcomes that are 0 or 1, with its interval."""
    n = len(outcomes)
    mean = sum(outcomes) / n
    low, high = wilson(mean, n)
    variance = sum((value - mean) ** 2 for value in outcomes) / (n - 1) if n > 1 else 0.0
    return ScoreMetric(
        value=mean, low=low, high=high, method="wilson", stderr=math.sqrt(variance / n)
    )


def wilson(mean: float, n: int, z: float = Z95) -> tuple[float, float]:
    """E. B. Wilson, Probable inference, 1927."""
    centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(mean * (1 - mean) / n + z * z / (4 * n * n))
    return max(centre - half, 0.0), min(centre + half, 1.0)


def ratio(above: Sequence[float], below: Sequence[float], seed: int = 0) -> ScoreMetric:
    """sum(above) / sum(below), with an interval from resampling the pairs.

    Pairs of nothing, as of an empty text, are not drawn.
    """
    upper, lower = np.asarray(above, float), np.asarray(below, float)
    upper, lower = upper[lower > 0], lower[lower > 0]
    value = float(upper.sum() / lower.sum())
    if len(upper) < 2:
        return ScoreMetric(value=value, low=value, high=value, method="none")
    places = np.random.default_rng(seed).integers(0, len(upper), (DRAWS, len(upper)))
    drawn = upper[places].sum(1) / lower[places].sum(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    return ScoreMetric(value=value, low=float(low), high=float(high), method="bootstrap")


def exponential(metric: ScoreMetric) -> ScoreMetric:
    """exp of a value and of its interval: a perplexity from nats per token."""
    low, value, high = (_exp(x) for x in (metric.low, metric.value, metric.high))
    return ScoreMetric(value=value, low=low, high=high, method=metric.method)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
