"""When does each request come? Seconds after the start, drawn before the first one is sent.

    constant   |   |   |   |   |   |      every 1/rate seconds
    poisson    | |     ||    |      |     independent people: exponential gaps
    gamma      |||          ||  |||       bursts: the same rate, gaps that vary more (or, above shape 1, less)
    trace      as a real service saw them (see `arrival_traces`), at its own speed or at another rate

A closed loop has no times: a request comes when another has ended, see `load_drive`. All draws come from a generator
that the caller seeds, so a run can be repeated. Pure: no clock, no socket.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from cairn.core.errors import UsageError

Kind = Literal["poisson", "constant", "gamma"]


def constant(rate: float) -> Iterator[float]:
    """0, 1/rate, 2/rate, ... without a rounding error that grows."""
    check_rate(rate)
    return (number / rate for number in itertools.count())


def poisson(rate: float, generator: random.Random) -> Iterator[float]:
    """Gaps from an exponential distribution; the first request comes after a gap, too."""
    check_rate(rate)
    return itertools.accumulate(_forever(lambda: generator.expovariate(rate)))


def gamma(rate: float, shape: float, generator: random.Random) -> Iterator[float]:
    """Gaps from a gamma distribution: mean 1/rate, variance 1/(shape * rate^2). Shape 1 is Poisson, below it bursts."""
    check_rate(rate)
    if not 0 < shape < math.inf:
        raise UsageError(
            f"the burstiness is {shape}", hint="above 0: 0.25 comes in bursts, 1 is Poisson"
        )
    return itertools.accumulate(_forever(lambda: generator.gammavariate(shape, 1 / (shape * rate))))


def times(
    kind: Kind,
    rate: float,
    generator: random.Random,
    *,
    shape: float = 1.0,
    count: int | None = None,
    duration_s: float | None = None,
) -> list[float]:
    """The arrivals before `duration_s`, at most `count`; an infinite rate sends all `count` at once."""
    if count is None and duration_s is None:
        raise UsageError(
            "neither a number of requests nor a duration is given", hint="give one of them"
        )
    if rate == math.inf:
        if count is None:
            raise UsageError(
                "an infinite rate needs a number of requests", hint="give --num-requests"
            )
        return [0.0] * count
    endless = {
        "constant": lambda: constant(rate),
        "poisson": lambda: poisson(rate, generator),
        "gamma": lambda: gamma(rate, shape, generator),
    }[kind]()
    return cut(endless, count, duration_s)


def cut(
    arrivals: Iterable[float], count: int | None = None, duration_s: float | None = None
) -> list[float]:
    """The arrivals before `duration_s`, at most `count`."""
    soon = arrivals
    if duration_s is not None:
        soon = itertools.takewhile(lambda moment: moment < duration_s, soon)
    return list(itertools.islice(soon, count))


def at_rate(arrivals: list[float], rate: float) -> list[float]:
    """The same pattern, faster or slower: n arrivals span (n - 1) / rate seconds, the first at 0."""
    check_rate(rate)
    if not arrivals:
        return []
    if rate == math.inf or arrivals[-1] == arrivals[0]:
        return [0.0] * len(arrivals)
    whole, span = arrivals[-1] - arrivals[0], (len(arrivals) - 1) / rate
    return [(moment - arrivals[0]) / whole * span for moment in arrivals]


def check_rate(rate: float) -> None:
    if not rate > 0:  # also not a number
        raise UsageError(
            f"the rate is {rate}", hint="requests per second, above 0; inf for at once"
        )


def _forever(draw: Callable[[], float]) -> Iterator[float]:
    while True:
        yield draw()
