"""Quorums in small: a replicated register and a majority election, on a virtual clock, with nothing but messages.

    Election   follower --timeout--> candidate --votes of a majority--> leader
               a vote is given once in a term, and only to terms that are new: that is all it takes

Delays and timeouts are drawn from a seed; nodes that are down neither vote nor stand. No log, nothing on disk: what
is left of Raft when only leaders are asked for.
"""

import heapq
import math
import random
from typing import NamedTuple

TIMEOUT_MS = 150.0


def stale_chance(nodes: int, written: int, read: int) -> float:
    """That a read of `read` nodes misses all that the last write has reached."""
    return math.comb(nodes - written, read) / math.comb(nodes, read)


def stale_share(nodes: int, written: int, asked: int, times: int, draw: random.Random) -> float:
    """The same by doing: versions on nodes, a write to some, a read of some, the newest version wins."""
    versions, stale = [0] * nodes, 0
    for version in range(1, times + 1):
        versions = [version - 1] * nodes  # the write before has reached everybody meanwhile
        for node in draw.sample(range(nodes), written):
            versions[node] = version
        stale += max(versions[node] for node in draw.sample(range(nodes), asked)) < version
    return stale / times


class Elected(NamedTuple):
    elected_ms: float | None  # None: no leader within the limit
    terms: int
    leaders_of_one_term: int  # most that any term had


class Election:
    """One election after the leader was lost at time 0."""

    def __init__(self, nodes: int, down: int, spread_ms: float, delay_ms: float, seed: int) -> None:
        """A timeout is TIMEOUT_MS and up to `spread_ms` more."""
        self.nodes, self.up = nodes, range(down, nodes)
        self.draw = random.Random(seed)
        self.spread_ms, self.delay_ms = spread_ms, delay_ms
        self.term = [0] * nodes  # the newest that each has heard of
        self.voted: list[dict[int, int]] = [{} for _ in range(nodes)]  # term -> for whom
        self.votes: dict[tuple[int, int], set[int]] = {}  # (term, candidate) -> who voted
        self.leaders: dict[int, set[int]] = {}
        self.woken = [0] * nodes  # how often its timeout was set anew: older alarms do not count
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.count = 0

    def run(self, limit_ms: float) -> Elected:
        for node in self.up:
            self._set_timeout(0.0, node)
        elected = None
        while self.events and elected is None:
            now, _, kind, what = heapq.heappop(self.events)
            if now > limit_ms:
                break
            elected = {"timeout": self._timeout, "ask": self._ask, "vote": self._vote}[kind](
                now, *what
            )
        # Messages under way still arrive: would they make a second leader?
        while self.events:
            now, _, kind, what = heapq.heappop(self.events)
            if kind != "timeout":
                {"ask": self._ask, "vote": self._vote}[kind](now, *what)
        most = max((len(chosen) for chosen in self.leaders.values()), default=0)
        return Elected(elected, max(self.term), most)

    def _later(self, now: float, kind: str, *what: int) -> None:
        self.count += 1
        delay = self.draw.expovariate(1 / self.delay_ms)
        heapq.heappush(self.events, (now + delay, self.count, kind, what))

    def _set_timeout(self, now: float, node: int) -> None:
        self.count += 1
        self.woken[node] += 1
        after = TIMEOUT_MS + self.draw.uniform(0, self.spread_ms)
        heapq.heappush(self.events, (now + after, self.count, "timeout", (node, self.woken[node])))

    def _timeout(self, now: float, node: int, alarm: int) -> None:
        """There is no leader: become a candidate of a new term, and vote for oneself."""
        if alarm != self.woken[node]:
            return
        self.term[node] += 1
        term = self.term[node]
        self.voted[node][term] = node
        self.votes[term, node] = {node}
        for other in self.up:
            if other != node:
                self._later(now, "ask", other, node, term)
        self._set_timeout(now, node)

    def _ask(self, now: float, node: int, candidate: int, term: int) -> None:
        """Vote for the first who asks in a term that is not older than what one has seen."""
        if term < self.term[node]:
            return
        self.term[node] = term
        if self.voted[node].setdefault(term, candidate) == candidate:
            self._later(now, "vote", candidate, node, term)
            self._set_timeout(now, node)

    def _vote(self, now: float, candidate: int, voter: int, term: int) -> float | None:
        votes = self.votes.setdefault((term, candidate), set())
        votes.add(voter)
        if len(votes) * 2 > self.nodes:
            self.leaders.setdefault(term, set()).add(candidate)
            return now
        return None
