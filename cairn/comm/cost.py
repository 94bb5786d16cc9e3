"""Cost model of collectives: the time of each schedule, and the fastest one for a message size.

Alpha-beta: a wait for the wire costs alpha, a byte costs 1/beta.

    time = steps * alpha + traffic * bytes / beta

`steps` and `traffic` (vectors through the busiest rank) are what `verify` counts; `shape_of` has them
in closed form, so that a hundred thousand ranks cost nothing, and a test holds the two together.

Measured curves need one term more, for pipelines that fill: `fit` finds  a + c sqrt(bytes) + bytes/b.
Its a*b is the message for which half of the bandwidth is lost to latency. What NCCL does by itself is
in `nccl_model`. Does not know topology: a link is the slowest that a step uses.
"""

import itertools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from cairn.comm.nccl_tests import SweepPoint
from cairn.comm.schedule.ops import Collective
from cairn.core.errors import ConfigError, did_you_mean


class LinkCost(msgspec.Struct, frozen=True, kw_only=True):
    alpha_us: float  # from posting a message to having it, without its bytes
    gb_per_s: float  # 1e9 bytes, in each direction


class AlgorithmShape(NamedTuple):
    steps: float
    traffic: float  # vectors


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    us: float
    steps: float
    traffic: float

    @property
    def why(self) -> str:
        return (
            f"{self.name}: {self.steps:g} waits, {self.traffic:.3g} x the bytes, {self.us:.4g} us"
        )


class LinkFit(msgspec.Struct, frozen=True, kw_only=True):
    """us = latency_us + ramp_us * sqrt(MiB) + bytes / (1000 * gb_per_s)"""

    latency_us: float
    ramp_us: float
    gb_per_s: float  # bytes of the vector per time, for ever larger vectors
    median_error: float  # of the points it was made from
    max_error: float

    def us(self, size: float) -> float:
        ramp = self.ramp_us * math.sqrt(size / (1 << 20))
        return self.latency_us + ramp + size / (1e3 * self.gb_per_s)

    @property
    def half_bytes(self) -> float:
        """Smaller messages lose more than half of the bandwidth to latency: make them larger."""
        return self.latency_us * 1e3 * self.gb_per_s


def _log2_up(n: int) -> int:
    return (n - 1).bit_length()


def _share(n: int) -> float:
    return (n - 1) / n


def _halving(n: int) -> AlgorithmShape:
    power = 1 << (n.bit_length() - 1)
    fold = power != n
    return AlgorithmShape(2 * _log2_up(power) + 2 * fold, 2 * _share(power) + fold)


def _bruck_distance(n: int) -> float:
    """Bits that are set in 0..n-1, counted bit by bit: how often a chunk is sent on average."""
    total, bit = 0, 1
    while bit < n:
        whole, rest = divmod(n, 2 * bit)
        total += whole * bit + max(rest - bit, 0)
        bit *= 2
    return total / n


CLOSED: dict[Collective, dict[str, Callable[[int], AlgorithmShape]]] = {
    "all_reduce": {
        "ring": lambda n: AlgorithmShape(2 * (n - 1), 2 * _share(n)),
        "pat": lambda n: AlgorithmShape(2 * _log2_up(n), 2 * _share(n)),
        "bruck": lambda n: AlgorithmShape(2 * _log2_up(n), 2 * _share(n)),
        "two_shot": lambda n: AlgorithmShape(2, 2 * _share(n)),
        "one_shot": lambda n: AlgorithmShape(1, n - 1),
        "halving_doubling": _halving,
    },
    "all_gather": {
        "ring": lambda n: AlgorithmShape(n - 1, _share(n)),
        "pat": lambda n: AlgorithmShape(_log2_up(n), _share(n)),
        "bruck": lambda n: AlgorithmShape(_log2_up(n), _share(n)),
        "direct": lambda n: AlgorithmShape(1, _share(n)),
    },
    "all_to_all": {
        "pairwise": lambda n: AlgorithmShape(n - 1, _share(n)),
        "bruck": lambda n: AlgorithmShape(_log2_up(n), _bruck_distance(n)),
    },
    "broadcast": {
        "binomial": lambda n: AlgorithmShape(n.bit_length() - 1, _log2_up(n)),
    },
}
CLOSED["reduce_scatter"] = CLOSED["all_gather"]
CLOSED["reduce"] = CLOSED["broadcast"]

Sending = Literal["together", "one_by_one"]
DIRECT = ("two_shot", "one_shot", "direct")


def shape_of(collective: Collective, name: str, ranks: int) -> AlgorithmShape:
    """Steps and traffic in closed form, for any number of ranks."""
    shapes = CLOSED[collective]
    if name not in shapes:
        raise ConfigError(
            f"no closed form for {collective}/{name}",
            hint=did_you_mean(name, shapes, f"there are: {', '.join(shapes)}"),
        )
    if ranks < 1:
        raise ConfigError(f"a collective of {ranks} ranks", hint="it needs at least one")
    return shapes[name](ranks) if ranks > 1 else AlgorithmShape(0, 0)


def estimate(
    collective: Collective, name: str, ranks: int, size: int, link: LinkCost, sending: Sending
) -> Estimate:
    """`sending`: whether a rank can post to all its peers at once, or pays alpha for each."""
    shape = shape_of(collective, name, ranks)
    steps = shape.steps * (ranks - 1) if name in DIRECT and sending == "one_by_one" else shape.steps
    us = steps * link.alpha_us + shape.traffic * size / (1e3 * link.gb_per_s)
    return Estimate(name=name, us=us, steps=steps, traffic=shape.traffic)


def choose(
    collective: Collective, ranks: int, size: int, link: LinkCost, sending: Sending = "one_by_one"
) -> list[Estimate]:
    """Every schedule with a closed form, fastest first; equals keep the order of the table."""
    if size < 0 or link.alpha_us < 0 or link.gb_per_s <= 0:
        raise ConfigError(
            f"{size} bytes over a link of {link.alpha_us} us and {link.gb_per_s} GB/s",
            hint="sizes and latencies are not negative, bandwidth is positive",
        )
    rows = [estimate(collective, name, ranks, size, link, sending) for name in CLOSED[collective]]
    return sorted(rows, key=lambda row: row.us)


def fit(points: list[SweepPoint]) -> LinkFit:
    """Least squares on relative errors; no constant is below zero."""
    if len({point.bytes for point in points}) < 3:
        raise ConfigError(
            f"{len(points)} measurements cannot fix three constants", hint="use three sizes or more"
        )
    size = np.array([point.bytes for point in points], dtype=float)
    measured = np.array([point.us for point in points], dtype=float)
    if (measured <= 0).any() or (size <= 0).any():
        raise ConfigError(
            "a size or a time is not positive", hint="leave out what was not measured"
        )
    terms = np.stack([np.ones_like(size), np.sqrt(size / (1 << 20)), size / 1e3], axis=1)
    weighted = terms / measured[:, None]
    best, least = None, math.inf
    for count in (1, 2, 3):
        for used in itertools.combinations(range(3), count):
            if 2 not in used:
                continue  # without bandwidth no time grows with the size
            coefficients, *_ = np.linalg.lstsq(weighted[:, used], np.ones_like(size), rcond=None)
            loss = float(((weighted[:, used] @ coefficients - 1) ** 2).sum())
            if coefficients.min() >= 0 and coefficients[-1] > 0 and loss < least:
                best, least = np.zeros(3), loss
                best[list(used)] = coefficients
    if best is None:
        raise ConfigError("the times do not grow with the size", hint="measure larger messages too")
    errors = np.abs(weighted @ best - 1)
    return LinkFit(
        latency_us=float(best[0]),
        ramp_us=float(best[1]),
        gb_per_s=float(1 / best[2]),
        median_error=float(np.median(errors)),
        max_error=float(errors.max()),
    )
