"""Monte Carlo of the same job: failures are drawn, an interval is tried until none falls into it, every second counts.

Independent of the formula in `reliability`: it draws how long the job lasts until its next failure and counts what was
done. The two have to agree; a distribution that is not exponential (Weibull: early deaths, worn parts) only it can do.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from cairn.cluster.reliability import RecoveryScheme

Floats = NDArray[np.float64]


class Lived(msgspec.Struct, frozen=True, kw_only=True):
    ettr: float
    error: float  # standard error of ettr
    failures: int
    shares: dict[str, float]


def live(
    mean: float,
    scheme: RecoveryScheme,
    interval: float,
    *,
    failures: int = 200_000,
    shape: float = 1.0,
    seed: int = 0,
    batches: int = 20,
) -> Lived:
    """Runs through `failures` failures. `shape` is Weibull's: 1 is without memory, below 1 failures come in bursts."""
    draw = np.random.default_rng(seed)
    scale = mean / math.gamma(1 + 1 / shape)
    gaps = draw.weibull(shape, failures) * scale  # up-time between failures, restarts included
    parts = np.stack(accounted(gaps, scheme, interval), axis=1)
    totals = parts.sum(0)
    wall = totals.sum()
    each = [chunk[:, 0].sum() / chunk.sum() for chunk in np.array_split(parts, batches)]
    names = ("checkpoint", "detect", "restart", "lost work")
    return Lived(
        ettr=float(totals[0] / wall),
        error=float(np.std(each, ddof=1) / math.sqrt(batches)),
        failures=failures,
        shares={name: float(totals[place] / wall) for place, name in enumerate(names, 1)},
    )


def accounted(gap: Floats, scheme: RecoveryScheme, interval: float) -> tuple[Floats, ...]:
    """Seconds from one failure to the next: productive, checkpoint, detect, restart, lost work."""
    detect = np.minimum(gap, scheme.detect)
    restart = np.minimum(gap - detect, scheme.restart)
    up = gap - detect - restart
    cycle = interval + scheme.write
    if cycle == 0:  # every moment is saved, and that costs nothing
        nothing = np.zeros_like(gap)
        return up, nothing, detect, restart, nothing
    got_through = np.floor(up / cycle)
    since = up - got_through * cycle  # the last checkpoint that was complete
    return got_through * interval, got_through * scheme.write, detect, restart, since
