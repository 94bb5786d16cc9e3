"""Source of each sample of a blend: weighted, evenly interleaved, a pure function of the sample number.

    weights 0.5, 0.3, 0.2     sample   0  1  2  3  4  5  6  7  8  9   then again
                              source   a  b  a  c  a  b  a  b  a  c

At every prefix n of the stream each source has given its share n * weight to within one sample, not just on
average. This is a scheduling problem with a known answer: the k-th sample of a source with weight w may not come
before floor(k / w) and must come before ceil((k + 1) / w); taking the one whose deadline is next always
works (earliest deadline first on one machine; Tijdeman's chairman problem). Weights are held as whole parts of
at most 65,536, so the pattern repeats and is made once.

Knows nothing about what the sources hold.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from cairn.core.errors import ConfigError
from cairn.train.data.source import Source

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

MAX_PARTS = 1 << 16


class Pattern:
    """Source and own number of each sample of the blend."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = whole_parts(weights)
        self.period = sum(self.parts)
        self._source = schedule(self.parts)
        self._earlier: list[int] = []  # how often this source came before in the pattern
        counts = [0] * len(self.parts)
        for source in self._source:
            self._earlier.append(counts[source])
            counts[source] += 1

    def locate(self, number: int) -> tuple[int, int]:
        """(source, number within the source) of sample `number` of the blend."""
        cycle, place = divmod(number, self.period)
        source = self._source[place]
        return source, cycle * self.parts[source] + self._earlier[place]


def whole_parts(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers in the same proportion; exact where their sum stays within MAX_PARTS."""
    if not weights or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ConfigError(
            f"the weights of a blend are numbers above 0, got {list(weights)}",
            hint="leave out a source instead of giving it weight 0",
        )
    exact = [Fraction(str(weight)) for weight in weights]  # 0.1 as it was written
    scale = math.lcm(*(weight.denominator for weight in exact))
    parts = [int(weight * scale) for weight in exact]
    divisor = math.gcd(*parts)
    parts = [part // divisor for part in parts]
    return parts if sum(parts) <= MAX_PARTS else _rounded(exact)


def _rounded(weights: Sequence[Fraction]) -> list[int]:
    """MAX_PARTS parts by largest remainder, at least one for each."""
    total = sum(weights)
    ideal = [weight / total * MAX_PARTS for weight in weights]
    if len(weights) > MAX_PARTS // 2:
        raise ConfigError(f"a blend of {len(weights)} sources is beyond {MAX_PARTS // 2}")
    parts = [max(1, math.floor(value)) for value in ideal]
    by_remainder = sorted(range(len(parts)), key=lambda at: parts[at] - ideal[at])
    for at in by_remainder[: max(0, MAX_PARTS - sum(parts))]:
        parts[at] += 1
    while sum(parts) > MAX_PARTS:  # tiny weights were lifted to one part: the largest pays
        parts[max(range(len(parts)), key=lambda at: parts[at])] -= 1
    return parts


def schedule(parts: Sequence[int]) -> list[int]:
    """Source of each sample in a period, by earliest deadline first."""
    period = sum(parts)
    waiting = [(0, source, 0) for source in range(len(parts))]  # (release, source, k)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, k)
    order = []
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, source, k = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(k + 1) * period // parts[source]), source, k))
        _, source, k = heapq.heappop(ready)
        order.append(source)
        if k + 1 < parts[source]:
            heapq.heappush(waiting, ((k + 1) * period // parts[source], source, k + 1))
    return order


class Blend:
    """Several sources as one."""

    def __init__(
        self, sources: Sequence[Source], weights: Sequence[float], names: Sequence[str] = ()
    ) -> None:
        """`names`: of the sources, for reports; by default their numbers."""
        if len(sources) != len(weights):
            raise ConfigError(
                f"{len(sources)} sources in the blend, but {len(weights)} weights",
                hint="give one weight for each source",
            )
        self.sources = list(sources)
        self.names = list(names) or [str(number) for number in range(len(sources))]
        self.pattern = Pattern(weights)
        lengths = sorted({source.sequence_length for source in sources})
        if len(lengths) != 1:
            raise ConfigError(f"the sources of a blend have samples of {lengths} tokens")
        self.sequence_length = lengths[0]

    @property
    def samples_per_epoch(self) -> int | None:
        """Until every source has been seen once; None when one of them never ends."""
        ends = []
        for source, part in zip(self.sources, self.pattern.parts, strict=True):
            if source.samples_per_epoch is None:
                return None
            ends.append(-(-source.samples_per_epoch * self.pattern.period // part))
        return max(ends)

    @property
    def fingerprint(self) -> str:
        pairs = zip(self.pattern.parts, self.sources, strict=True)
        return "blend(" + ", ".join(f"{part} {source.fingerprint}" for part, source in pairs) + ")"

    def batch(self, number: int) -> "Batch":
        source, own = self.pattern.locate(number)
        return self.sources[source].batch(own)._replace(ids=[number])
