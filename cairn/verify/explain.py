"""Hypothesis tests over log probabilities that find the cause of a deviation. Pure arithmetic.

    explained = 1 - distance(observed, plain path under the hypothesis) / distance(observed, plain path)

taken over the places at which the hypothesis says something else than the plain path. A cause is named if it explains
more than half. Rounding explains nothing of the sort: its errors point nowhere, so what is left after every
hypothesis is judged by its size, against the sizes that bfloat16, 8-bit and 4-bit weights would make.

A cause whose effect is smaller than the rounding explains less than half. It is named all the same if it explains some
of it, and if place after place the observations lean its way:

    leaning = sum of a / sqrt(sum of a^2),  a = <observed - plain, under the hypothesis - plain> at one place

If errors point either way equally often, a leaning above x has a probability below exp(-x^2 / 2), however unequal the
places are.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from cairn.verify.agreement import matched, roots, squared
from cairn.verify.evidence import Observation
from cairn.verify.hypotheses import Hypothesis

Level = Literal["float32", "bfloat16", "int8", "int4"]
LEVELS: tuple[Level, ...] = ("float32", "bfloat16", "int8", "int4")
# Mean distance up to which two float32 computations are the same: sums in another order.
SAME = 4e-9
MARGIN = 6.0  # times the size that a level predicts: activations are rounded, too, and texts differ
NAMED = 0.5  # of the difference, above which a cause is named
FAINT = 0.15  # above which one is named that rounding hides the size of, if the observations lean its way
LEANING = 4.5  # by chance once in 25,000 causes
FEWEST = 6  # places that a cause has to be seen at
MASS = 0.9  # of what a hypothesis changes; the places with the rest of it hold mostly noise


class HypothesisFit(NamedTuple):
    hypothesis: Hypothesis
    explained: float  # of the difference: 1 all of it, 0 nothing, below 0 it is further away than the plain path
    size: float  # mean distance between the plain path and the path under the hypothesis
    places: int  # at which it was judged
    leaning: float = 0.0  # how surely the observations differ from the plain path in its direction

    @property
    def named(self) -> bool:
        """Rounding of weights is the same error at every place, so one that is faint is judged by its size alone."""
        faint = self.explained > FAINT and self.leaning > LEANING and self.hypothesis.bits is None
        return (self.explained > NAMED or faint) and self.places >= FEWEST

    @property
    def likely(self) -> bool:
        """Worth trying on more places."""
        return self.named or (self.explained > 0 and self.leaning > LEANING / 2)


def mean_distance(observed: Sequence[Observation], expected: Sequence[Observation]) -> float:
    found = [_apart(seen, known) for seen, known in matched(observed, expected)]
    return math.fsum(found) / len(found) if found else 0.0


def _apart(seen: dict[int, float], known: dict[int, float]) -> float:
    tokens = [token for token in seen if token in known]
    return squared(roots(seen, tokens), roots(known, tokens))


def fit(
    hypothesis: Hypothesis,
    observed: Sequence[Observation],
    plain: Sequence[Observation],
    under: Sequence[Observation],
) -> HypothesisFit:
    """All three have the same probes, and the rows of `plain` and `under` have every token that was observed.

    A row is empty where nothing is known: a text that begins with its first word says nothing about that.
    """
    places, leans = [], []
    for seen, expected, changed in zip(observed, plain, under, strict=True):
        for row, plain_row, under_row in zip(seen.rows, expected.rows, changed.rows, strict=True):
            if not (row and plain_row and under_row):
                continue
            a, p, h = (roots(one, list(row)) for one in (row, plain_row, under_row))
            places.append((squared(p, h), squared(a, p), squared(a, h)))
            leans.append(math.fsum((x - y) * (z - y) for x, y, z in zip(a, p, h, strict=True)))
    size = math.fsum(place[0] for place in places)
    if not places or size == 0.0:
        return HypothesisFit(hypothesis, 0.0, 0.0, 0)
    judged = _most_of(places, size)
    before = math.fsum(place[1] for place in judged)
    after = math.fsum(place[2] for place in judged)
    explained = 1 - after / max(before, 1e-300)
    leaning = math.fsum(leans) / max(math.sqrt(math.fsum(a * a for a in leans)), 1e-300)
    return HypothesisFit(hypothesis, explained, size / len(places), len(judged), leaning)


def _most_of(places: list[tuple[float, float, float]], size: float) -> list[tuple[float, ...]]:
    """The places with most of the change that a hypothesis predicts, largest first."""
    judged: list[tuple[float, ...]] = []
    mass = 0.0
    for place in sorted(places, reverse=True):
        if mass >= MASS * size and len(judged) >= FEWEST:
            break
        judged.append(place)
        mass += place[0]
    return judged


def best(fits: Sequence[HypothesisFit]) -> HypothesisFit | None:
    """The cause that explains most, if one does."""
    named = [one for one in fits if one.named]
    return max(named, key=lambda one: one.explained, default=None)


def level_of(distance: float, sizes: Mapping[Level, float]) -> Level | None:
    """The least rounding that makes a difference as large as this one; None: none does."""
    for level in LEVELS:
        if distance <= max(SAME, MARGIN * sizes.get(level, 0.0)):
            return level
    return None


def within(level: Level | None, expected: Level) -> bool:
    return level is not None and LEVELS.index(level) <= LEVELS.index(expected)
