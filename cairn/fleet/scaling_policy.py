"""Autoscaling policy from waiting, running and expected requests. Pure, without a clock.

    floor     prompts that arrive, in servers' worth of work, and requests that decode; ahead by the time a start takes
    bursts    as many as would have served the last minutes' requests in time, nearly all of them
    fast      one more when the next request would wait for longer than the SLO allows
    down      one less when the others would carry it with room to spare, for long enough
    zero      none after so long without a request; one as soon as a request waits

`LoadMeter` turns what a router sees into `Seen`; `decide` is the policy. Simulator and `cairn fleet serve` use both.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

import msgspec

WINDOW_S = 30.0  # over which arrivals are averaged
BUSY = 0.6  # of a server's time that prompts may take
FULL = 0.8  # of the rows that may decode
SPARE = 0.8  # of both that may be in use after a server has gone
RECENT_S, MOST_RECENT = 300.0, 2000  # requests that bursts are looked for in
LATE = 0.02  # of them that may miss the SLO
BESIDE = 0.7  # of its speed, at which a server computes prompts beside answers


class Arrived(NamedTuple):
    """A request, and the seconds that its prompt takes."""

    at_s: float
    prefill_s: float


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    least: int = 1
    most: int = 1
    rows: int = 64  # requests that a server decodes within the SLO
    ttft_s: float = 2.0  # the SLO
    start_s: float = 20.0  # until a new server answers
    idle_s: float = 300.0  # without a request, after which there are none; where `least` is 0
    calm_s: float = 60.0  # since the last change, before a server is taken away


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    now_s: float
    ready: int
    starting: int
    held: int = 0  # requests that wait for any server
    in_flight: int = 0  # requests at servers
    wait_s: float = 0.0  # until the first token, at the server that is chosen now
    prefill: float = 0.0  # seconds of prompts that arrive in a second
    prefill_before: float = 0.0  # the same, one window earlier
    recent: Sequence[Arrived] = ()  # of the last minutes, in their order
    idle_s: float = 0.0  # since the last request
    calm_s: float = math.inf  # since the last change


def decide(seen: Seen, rules: Rules) -> int:
    """The number of servers to have, those that start included."""
    have = seen.ready + seen.starting
    if rules.least == 0 and seen.idle_s >= rules.idle_s and not (seen.held or seen.in_flight):
        return 0
    if have == 0:
        return max(rules.least, min(1, rules.most)) if seen.held else rules.least
    wanted = max(have, needed(seen, rules))
    if seen.wait_s > rules.ttft_s and not seen.starting:
        wanted = max(wanted, have + 1)
    if wanted == have and not seen.starting and _can_lose_one(seen, rules):
        wanted = have - 1
    return min(max(wanted, rules.least, 1 if seen.in_flight or seen.held else 0), rules.most)


def needed(seen: Seen, rules: Rules) -> int:
    """Servers for what will be arriving when one that is started now answers, and for bursts as they came lately."""
    growth = max(0.0, seen.prefill - seen.prefill_before)
    prefill = seen.prefill + growth * rules.start_s / WINDOW_S
    decoding = (seen.in_flight + seen.held) / rules.rows
    by_load = math.ceil(max(prefill / BUSY, decoding / FULL) - 1e-9)
    return max(by_load, for_bursts(seen.recent, rules))


def for_bursts(recent: Sequence[Arrived], rules: Rules) -> int:
    """The fewest servers that would have served nearly all of these in time; `most` where none are enough.

    A load of half a server that comes nine at a time needs three: averages do not see that.
    """

    def enough(servers: int) -> bool:
        return late_share(recent, servers, rules.ttft_s) <= LATE

    return 1 + bisect_left(range(1, rules.most), True, key=enough) if recent else 0


def late_share(recent: Sequence[Arrived], servers: int, ttft_s: float) -> float:
    """Share of requests whose first token is late with this number of servers.

    A prompt that takes too long by itself is not counted: more servers do not help it.
    """
    free_s, late = [-math.inf] * servers, 0  # when each server has nothing left; a heap
    for at_s, prefill_s in recent:
        takes_s = prefill_s / BESIDE
        ends_s = max(free_s[0], at_s) + takes_s
        heapreplace(free_s, ends_s)
        late += ends_s - at_s > ttft_s >= takes_s
    return late / len(recent)


def _can_lose_one(seen: Seen, rules: Rules) -> bool:
    """Would the others carry everything? Asked of all but one, so that two never become one and two again."""
    left = seen.ready - 1
    if left < max(rules.least, 1) or seen.calm_s < rules.calm_s or seen.held:
        return False
    if for_bursts(seen.recent, rules) > left:
        return False
    prefill = max(seen.prefill, seen.prefill_before) / left
    decoding = seen.in_flight / (left * rules.rows)
    return prefill < SPARE * BUSY and decoding < SPARE * FULL and seen.wait_s < rules.ttft_s / 2


class LoadMeter:
    """Arrival load in prefill seconds: two windows, and the last requests individually."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._arrivals: deque[tuple[float, float]] = deque()
        self._recent: list[Arrived] = []
        self.last_s = now_s  # a request came
        self.changed_s = -math.inf  # the number of servers did

    def arrived(self, now_s: float, prefill_s: float, came_s: float | None = None) -> None:
        """`came_s`: before now, where it waited until its work was known."""
        self.last_s = now_s
        self._arrivals.append((now_s, prefill_s))
        if prefill_s:
            insort(self._recent, Arrived(now_s if came_s is None else came_s, prefill_s))
        self._forget(now_s)

    def seen(
        self, now_s: float, *, ready: int, starting: int, held: int, in_flight: int, wait_s: float
    ) -> Seen:
        self._forget(now_s)
        recent = sum(cost for at, cost in self._arrivals if at >= now_s - WINDOW_S)
        before = sum(cost for at, cost in self._arrivals if at < now_s - WINDOW_S)
        return Seen(
            now_s=now_s,
            ready=ready,
            starting=starting,
            held=held,
            in_flight=in_flight,
            wait_s=wait_s,
            prefill=recent / WINDOW_S,
            prefill_before=before / WINDOW_S,
            recent=self._bursts(now_s),
            idle_s=now_s - self.last_s,
            calm_s=now_s - self.changed_s,
        )

    def _bursts(self, now_s: float) -> tuple[Arrived, ...]:
        """The last requests; after a rush, when less than half as much comes, those that came since."""
        recent = self._recent
        since = bisect_left(recent, (now_s - 2 * WINDOW_S, 0.0))
        if not since:
            return tuple(recent)
        lately_s, all_s = (sum(one.prefill_s for one in part) for part in (recent[since:], recent))
        goes_on = lately_s / (2 * WINDOW_S) >= all_s / (now_s - recent[0].at_s) / 2
        return tuple(recent if goes_on else recent[since:])

    def _forget(self, now_s: float) -> None:
        while self._arrivals and self._arrivals[0][0] < now_s - 2 * WINDOW_S:
            self._arrivals.popleft()
        old = bisect_left(self._recent, (now_s - RECENT_S, 0.0))
        del self._recent[: max(old, len(self._recent) - MOST_RECENT)]


class ScaledModel:
    """A model whose servers come and go, and what arrives for it."""

    def __init__(
        self, names: Sequence[str], now_s: float, first: bool = True, ttft_s: float = math.inf
    ) -> None:
        """`first`: it also gets the requests that name no model. `ttft_s`: first tokens are due within it."""
        self.names, self.first, self.meter = list(names), first, LoadMeter(now_s)
        self.ttft_s = ttft_s
        self.problem = ""  # why its last server could not be started

    def serves(self, model: str | None) -> bool:
        return model in self.names if model is not None else self.first
