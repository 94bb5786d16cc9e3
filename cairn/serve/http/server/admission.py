"""Admission control: a bounded queue, a deadline for the first token, limits per key. Refusals are immediate.

    inside = sequences that were let in and have not ended <= rows of the engine + max_waiting     else 429
    wait   = those without a first token / how fast first tokens came of late <= 4/5 of the deadline   else 503

Both say when to come again. Pure: no engine, no socket, the clock is handed in. One thread, the event loop's.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable

import msgspec

from cairn.serve.http.protocol.refusal import Refusal

REMEMBERED = 64  # first tokens
WINDOW_S = 30.0  # older ones say nothing about now
LONGEST_RETRY_S = 60.0
SAFE = 0.8  # of the deadline: who is let in on an estimate should not wait for it to be wrong, and be refused then


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    rows: int  # of the engine: sequences that run at once
    waiting: int  # sequences beyond those
    first_token_s: float
    key_per_minute: int | None = None
    key_at_once: int | None = None


class Ticket:
    """Ticket of an admitted request. `close` returns its place and may be called twice."""

    def __init__(self, admission: "Admission", holder: str, sequences: int) -> None:
        self._admission, self.holder = admission, holder
        self.sequences = sequences
        self._waiting = sequences  # without a first token
        self._open = True

    def first_token(self) -> None:
        """Record the first token of one of its sequences."""
        if self._open and self._waiting > 0:
            self._waiting -= 1
            self._admission.began()

    def close(self) -> None:
        if self._open:
            self._open = False
            self._admission.left(self.holder, self.sequences, self._waiting)


class Admission:
    def __init__(self, rules: Rules, clock: Callable[[], float] = time.monotonic) -> None:
        self.rules, self._clock = rules, clock
        self.inside = 0
        self.waiting = 0  # of those, without a first token
        self.draining = False
        self._begun: deque[float] = deque(maxlen=REMEMBERED)
        self._at_once: defaultdict[str, int] = defaultdict(int)
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens left, and when that was

    def bill(self, holder: str) -> None:
        """Count a request of this key, whatever becomes of it; 429 if it has made too many of late."""
        rules = self.rules
        if rules.key_per_minute is None:
            return
        now, rate = self._clock(), rules.key_per_minute / 60
        left, since = self._buckets.get(holder, (float(rules.key_per_minute), now))
        left = min(rules.key_per_minute, left + (now - since) * rate)
        if left < 1:
            self._buckets[holder] = (left, now)
            raise Refusal(
                429,
                f"this key may make {rules.key_per_minute} requests in a minute",
                code="key_rate",
                retry_after_s=(1 - left) / rate,
            )
        self._buckets[holder] = (left - 1, now)

    def admit(self, holder: str, sequences: int) -> Ticket:
        """A place for all of them, or a refusal."""
        self.check(sequences)
        self._check_concurrency(holder)
        self.inside += sequences
        self.waiting += sequences
        self._at_once[holder] += 1
        return Ticket(self, holder, sequences)

    def check(self, sequences: int = 1) -> None:
        """Refuses what would find no place now: called before any work is done on a request."""
        if self.draining:
            raise Refusal(
                503, "the server is stopping", code="draining", retry_after_s=LONGEST_RETRY_S
            )
        rules = self.rules
        most = rules.rows + rules.waiting
        if sequences > most:
            raise Refusal(
                400,
                f"the request asks for {sequences} answers (prompts times n); the server takes at most {most} "
                f"at a time: {rules.rows} run and {rules.waiting} wait",
                param="n",
            )
        if self.inside + sequences > most:
            raise Refusal(
                429,
                f"the line is full: {self.inside} requests are in it, {most} fit",
                code="queue_full",
                retry_after_s=self._retry(self.wait_s(sequences)),
            )
        wait = self.wait_s()
        promised = rules.first_token_s * SAFE
        if wait > promised:
            raise Refusal(
                503,
                f"the first token would come after about {wait:.1f} s; the deadline is {rules.first_token_s:g} s, "
                f"and {promised:g} s of waiting are the most that is begun with",
                code="deadline",
                retry_after_s=self._retry(wait - promised),
            )

    def wait_s(self, more: int = 0) -> float:
        """Expected wait of a new request for its first token, from recent ones; 0 if unknown."""
        now = self._clock()
        while self._begun and now - self._begun[0] > WINDOW_S:
            self._begun.popleft()
        # Those that fit into free rows do not wait in line.
        behind = min(self.waiting, self.inside - self.rules.rows) + more
        if behind <= 0 or len(self._begun) < 2:
            return 0.0
        return behind * (now - self._begun[0]) / (len(self._begun) - 1)

    def began(self) -> None:
        self.waiting -= 1
        if self.inside <= self.rules.rows:  # no line: how fast they begin is how fast they come
            self._begun.clear()
        else:
            self._begun.append(self._clock())

    def left(self, holder: str, sequences: int, waiting: int) -> None:
        self.inside -= sequences
        self.waiting -= waiting
        self._at_once[holder] -= 1
        if not self._at_once[holder]:
            del self._at_once[holder]

    def _retry(self, wait: float) -> float:
        return min(max(wait, 1.0), LONGEST_RETRY_S)

    def _check_concurrency(self, holder: str) -> None:
        most, now = self.rules.key_at_once, self._at_once.get(holder, 0)
        if most is not None and now >= most:
            raise Refusal(
                429,
                f"this key has {now} requests at once, its limit is {most}",
                code="key_concurrency",
                retry_after_s=1,
            )
