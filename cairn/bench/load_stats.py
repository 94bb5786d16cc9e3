"""Statistics of the records: percentiles with confidence intervals, throughput, goodput, warm-up detection.

    begin          steady window                    last arrival       end
    |--- warm-up --|--------------------------------|---- drain -------|

Latencies of neighbours in a queue resemble each other, so intervals come from a bootstrap over blocks of neighbours,
and those of a rate from the means of ten stretches of time (Student's t); both at 95%. Where the warm-up ends is found
with MSER-5 (White 1997): the cut after which the mean of the rest is known best. Pure: needs numpy, no clock.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from cairn.bench.load_answer import RequestRecord

Values = Sequence[float] | np.ndarray
Interval = tuple[float, float]

RESAMPLES = 400
BATCHES = 10
MSER_BATCH = 5

# Student's t at 97.5%, for 1, 2, ... degrees of freedom.
_T = (
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
    2.120,
    2.110,
    2.101,
    2.093,
    2.086,
    2.080,
    2.074,
    2.069,
    2.064,
    2.060,
    2.056,
    2.052,
    2.048,
    2.045,
    2.042,
)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of a quantity; each interval contains the preceding value with 95% confidence."""

    count: int
    mean: float
    mean_ci: Interval
    p50: float
    p50_ci: Interval
    p90: float
    p90_ci: Interval
    p99: float
    p99_ci: Interval
    largest: float


class LatencySlo(msgspec.Struct, frozen=True, kw_only=True):
    """Latency limits that a request must meet to count for goodput; None is no limit."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class TimeWindow(NamedTuple):
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def spread(values: Values, seed: int = 0) -> Spread | None:
    """Distribution of values in time order, which the interval of a correlated mean needs; None for no values."""
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        return None
    points = np.percentile(array, [50, 90, 99])
    draws = block_bootstrap(
        array,
        lambda rows: np.vstack([rows.mean(axis=1), np.percentile(rows, [50, 90, 99], axis=1)]),
        seed,
    )
    low, high = np.percentile(draws, [2.5, 97.5], axis=1)
    mean, p50, p90, p99 = (
        (float(value), (float(lower), float(upper)))
        for value, lower, upper in zip([array.mean(), *points], low, high, strict=True)
    )
    return Spread(
        count=int(array.size),
        mean=mean[0],
        mean_ci=mean[1],
        p50=p50[0],
        p50_ci=p50[1],
        p90=p90[0],
        p90_ci=p90[1],
        p99=p99[0],
        p99_ci=p99[1],
        largest=float(array.max()),
    )


def block_bootstrap(
    values: np.ndarray,
    statistics: Callable[[np.ndarray], np.ndarray],
    seed: int = 0,
    resamples: int = RESAMPLES,
    block: int | None = None,
) -> np.ndarray:
    """[statistic, resample]: what would have been measured, had the same blocks of neighbours come in another mixture.

    Blocks are about n^(1/3) long and go round the end (circular), so that each value is as likely as the next.
    """
    n = len(values)
    block = block or max(1, round(n ** (1 / 3)))
    count = -(-n // block)
    generator = np.random.default_rng(seed)
    most = max(1, 4_000_000 // n)  # resamples at a time: a few tens of megabytes
    parts = []
    for begin in range(0, resamples, most):
        rows = min(most, resamples - begin)
        starts = generator.integers(0, n, size=(rows, count, 1))
        places = (starts + np.arange(block)).reshape(rows, -1)[:, :n] % n
        parts.append(statistics(values[places]))
    return np.concatenate(parts, axis=1)


def t_interval(values: Values) -> Interval | None:
    """Confidence interval of the mean of independent values; None for fewer than two."""
    array = np.asarray(values, dtype=float)
    freedom = len(array) - 1
    if freedom < 1:
        return None
    t = _T[freedom - 1] if freedom <= len(_T) else 1.96 + 2.4 / freedom
    half = t * float(array.std(ddof=1)) / math.sqrt(len(array))
    return float(array.mean()) - half, float(array.mean()) + half


def warmup_length(values: Values, batch: int = MSER_BATCH) -> int:
    """Number of leading values to drop as warm-up; at most half of them, otherwise there is no steady state."""
    array = np.asarray(values, dtype=float)
    batches = len(array) // batch
    if batches < 4:
        return 0
    means = array[: batches * batch].reshape(batches, batch).mean(axis=1)
    scores = [
        float(((means[cut:] - means[cut:].mean()) ** 2).sum()) / (batches - cut) ** 2
        for cut in range(batches // 2 + 1)
    ]
    return int(np.argmin(scores)) * batch


def whole_window(records: Sequence[RequestRecord]) -> TimeWindow:
    """The time from the first due request to the last response."""
    return TimeWindow(
        min(record.due_s for record in records), max(record.end_s for record in records)
    )


def steady_window(
    records: Sequence[RequestRecord], last_start_s: float | None = None
) -> TimeWindow:
    """The time without the warm-up and without the decreasing load after the last arrival."""
    ordered = sorted(records, key=lambda record: record.due_s)
    good = [record for record in ordered if record.error is None]
    end_s = ordered[-1].due_s if last_start_s is None else last_start_s
    begin_s = ordered[0].due_s
    if good:
        begin_s = good[warmup_length([record.e2e_s for record in good])].due_s
    if end_s <= begin_s:  # all at once
        return whole_window(records)
    return TimeWindow(begin_s, end_s)


def token_times(records: Sequence[RequestRecord]) -> tuple[np.ndarray, np.ndarray]:
    """When tokens came, and how many: an event with several of them counts for all of its share."""
    moments: list[float] = []
    weights: list[float] = []
    for record in records:
        if record.chunk_s:
            moments += record.chunk_s
            weights += [record.output_tokens / len(record.chunk_s)] * len(record.chunk_s)
    return np.array(moments), np.array(weights)


def rate_within(
    moments: np.ndarray, weights: np.ndarray, window: TimeWindow
) -> tuple[float, Interval | None]:
    """Per second within a window, with an interval from ten stretches of it."""
    if window.seconds <= 0:
        return 0.0, None
    edges = np.linspace(window.begin_s, window.end_s, BATCHES + 1)
    counts, _ = np.histogram(moments, bins=edges, weights=weights)
    rates = counts / (window.seconds / BATCHES)
    return float(rates.mean()), t_interval(rates)


def is_good(record: RequestRecord, slo: LatencySlo) -> bool:
    """No error, and within every promise. An answer of one token has no TPOT to break."""
    if record.error is not None:
        return False
    limits = (
        (record.ttft_s, slo.ttft_s),
        (record.tpot_s, slo.tpot_s),
        (record.e2e_s, slo.e2e_s),
    )
    return all(limit is None or value is None or value <= limit for value, limit in limits)


def errors(records: Sequence[RequestRecord]) -> dict[str, int]:
    """Count the errors by message, most frequent first."""
    return dict(Counter(r.error for r in records if r.error is not None).most_common())


def in_flight(records: Sequence[RequestRecord]) -> list[tuple[float, int]]:
    """Number of requests in flight after each change; a request counts from its due time."""
    changes = Counter[float]()
    for record in records:
        changes[record.due_s] += 1
        changes[record.end_s] -= 1
    level = 0
    steps = []
    for moment in sorted(changes):
        level += changes[moment]
        steps.append((moment, level))
    return steps
