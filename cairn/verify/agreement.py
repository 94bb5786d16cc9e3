"""Distance between two sets of log probabilities. Pure arithmetic.

A source gives the log-probabilities of a few tokens at each place, not of the whole vocabulary. Both sides are compared
as distributions over those few tokens and `the rest`: what is found apart is apart in the whole distribution, too.

    KL            what is usually reported; a lower bound of that over the whole vocabulary
    distance      squared Hellinger distance, sum of (sqrt p - sqrt q)^2 / 2: bounded, symmetric, and not upset by
                  log-probabilities that were rounded before they were sent; differences are judged by it
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cairn.verify.evidence import Observation, Row

LEAST = 1e-12  # probability of what was rounded away
Roots = list[float]  # square roots of the probabilities of one place


class LogprobAgreement(NamedTuple):
    """Observed against expected, over all places."""

    places: int
    top1: float  # share of the places at which both find the same token likeliest
    kl: float  # mean, in nats
    largest_kl: float
    worst: int  # the place of the largest

    @property
    def empty(self) -> bool:
        return not self.places


def shares(row: Row, tokens: Sequence[int]) -> list[float]:
    """Probabilities of these tokens, and of the rest."""
    found = [math.exp(min(row[token], 0.0)) for token in tokens]
    return [*found, max(1.0 - math.fsum(found), LEAST)]


def common(observed: Row, expected: Row) -> list[int]:
    return [token for token in observed if token in expected]


def place_kl(observed: Row, expected: Row) -> float:
    tokens = common(observed, expected)
    pairs = zip(shares(expected, tokens), shares(observed, tokens), strict=True)
    return max(
        0.0, math.fsum(p * (math.log(max(p, LEAST)) - math.log(max(q, LEAST))) for p, q in pairs)
    )


def roots(row: Row, tokens: Sequence[int]) -> Roots:
    return [math.sqrt(share) for share in shares(row, tokens)]


def squared(a: Roots, b: Roots) -> float:
    """Squared Hellinger distance of two places."""
    return math.fsum((x - y) ** 2 for x, y in zip(a, b, strict=True)) / 2


def agreement(observed: Sequence[Observation], expected: Sequence[Observation]) -> LogprobAgreement:
    pairs = list(matched(observed, expected))
    if not pairs:
        return LogprobAgreement(0, 1.0, 0.0, 0.0, 0)
    kls = [place_kl(seen, known) for seen, known in pairs]
    worst = max(range(len(kls)), key=kls.__getitem__)
    same = sum(same_top(seen, known) for seen, known in pairs)
    return LogprobAgreement(
        len(pairs), same / len(pairs), math.fsum(kls) / len(kls), kls[worst], worst
    )


def same_top(observed: Row, expected: Row) -> bool:
    """Return whether the most likely token is the same, up to ties."""
    likeliest = max(observed, key=observed.__getitem__)
    best = max(expected.values())
    return expected.get(likeliest, -math.inf) >= best - 1e-6


def matched(
    observed: Sequence[Observation], expected: Sequence[Observation]
) -> list[tuple[Row, Row]]:
    """The rows of both sides of each probe, place by place, for as long as their tokens are the same."""
    known = {one.probe: one for one in expected}
    pairs: list[tuple[Row, Row]] = []
    for one in observed:
        other = known.get(one.probe)
        if other is not None:
            pairs += _pairs(one, other)
    return pairs


def _pairs(one: Observation, other: Observation) -> Iterator[tuple[Row, Row]]:
    if one.ids[: one.first] != other.ids[: other.first]:
        return
    for place, (seen, known) in enumerate(zip(one.rows, other.rows, strict=False)):
        if seen and known:
            yield seen, known
        if one.at(place) != other.at(place):
            return  # what follows are two different texts
