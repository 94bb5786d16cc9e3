"""Which server has how much of this prompt? Keys of prefixes, fed by the servers' own events.

    stored(3, [(key, tokens), ...])   removed(3, [key])   forget(3)       numbered events; a gap makes a server unknown
    match(keys) -> {server: cached tokens}

A key holds a bit for each server. `match` goes along the prompt and keeps the bits that all keys so far have, so it
ends where nobody has more. Decisions that were just made count as if the server had stored the keys already, until its
events come or they expire: siblings of a burst go to the same place. Pure; the clock is handed in.
"""

from collections import deque
from collections.abc import Iterable, Sequence

from cairn.serve.pulse import Events

EXPECTED_S = 10.0  # that a decision counts without an event


class KeyIndex:
    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bits of the servers that have it
        self._tokens: dict[int, int] = {}  # key -> tokens cached up to it
        self._keys_of: dict[int, set[int]] = {}  # server -> its keys
        self._next: dict[int, int] = {}  # server -> number of the event that comes next
        self._broken: set[int] = set()  # servers of which an event is missing
        self._expected: dict[tuple[int, int], float] = {}  # (key, server) -> when it expires
        self._expiring: deque[tuple[float, int, Sequence[int]]] = deque()  # when, server, keys
        self._expected_bits: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, server: int, events: Events) -> bool:
        """Take in numbered events; False: one is missing, and the server is unknown until `forget` and its number 0.

        A number that was seen before changes nothing.
        """
        if events.number == 0 and server not in self._broken:  # a second one is a copy
            self._next.setdefault(server, 0)
        due = self._next.get(server)
        if due is None:
            return False
        if events.number < due:
            return True
        if events.number > due:
            self.forget(server)
            self._broken.add(server)
            return False
        self._next[server] = due + 1
        if events.cleared:
            self._drop(server, list(self._keys_of.get(server, ())))
        self._drop(server, events.removed)
        self._store(server, events.stored)
        return True

    def knows(self, server: int) -> bool:
        """Does it have everything that this server has told?"""
        return server in self._next

    def forget(self, server: int) -> None:
        """It was started again, or its events cannot be followed."""
        self._drop(server, list(self._keys_of.pop(server, ())))
        self._next.pop(server, None)
        self._broken.discard(server)
        for key, other in [pair for pair in self._expected if pair[1] == server]:
            self._unexpect(key, other)

    def expect(self, server: int, keys: Sequence[int], now_s: float) -> None:
        """A prompt with these keys was just sent there."""
        ends, bit = now_s + EXPECTED_S, 1 << server
        expected, bits = self._expected, self._expected_bits
        for key in keys:
            expected[key, server] = ends
            bits[key] = bits.get(key, 0) | bit
        self._expiring.append((ends, server, keys))

    def match(
        self, keys: Sequence[int], estimates: Sequence[int], now_s: float = 0.0
    ) -> dict[int, int]:
        """Cached tokens by server. `estimates[i]`: tokens up to key i, for keys that nobody has counted yet."""
        if self._expiring and self._expiring[0][0] <= now_s:
            self._expire(now_s)
        holders, expected, counted = self._holders, self._expected_bits, self._tokens
        found: dict[int, int] = {}
        bits, tokens = -1, 0  # -1: everybody, until somebody has a key
        for at, key in enumerate(keys):
            here = holders.get(key, 0) | expected.get(key, 0)
            if not here and bits == -1:
                continue  # before the first full page there is nothing to store
            if bits != here:
                if bits != -1:
                    _note(found, bits & ~here, tokens)
                bits &= here
                if not bits:
                    return found
            tokens = counted.get(key) or estimates[at]
        if bits > 0:
            _note(found, bits, tokens)
        return found

    # -- inside ----------------------------------------------------------------------------------

    def _store(self, server: int, stored: Iterable[tuple[int, int]]) -> None:
        bit, own = 1 << server, self._keys_of.setdefault(server, set())
        for key, tokens in stored:
            self._holders[key] = self._holders.get(key, 0) | bit
            self._tokens[key] = tokens
            own.add(key)
            if (key, server) in self._expected:
                self._unexpect(key, server)

    def _drop(self, server: int, keys: Iterable[int]) -> None:
        bit, own = 1 << server, self._keys_of.get(server, set())
        for key in keys:
            own.discard(key)
            left = self._holders.get(key, 0) & ~bit
            if left:
                self._holders[key] = left
            elif key in self._holders:
                del self._holders[key], self._tokens[key]

    def _unexpect(self, key: int, server: int) -> None:
        del self._expected[key, server]
        left = self._expected_bits[key] & ~(1 << server)
        if left:
            self._expected_bits[key] = left
        else:
            del self._expected_bits[key]

    def _expire(self, now_s: float) -> None:
        while self._expiring and self._expiring[0][0] <= now_s:
            _, server, keys = self._expiring.popleft()
            for key in keys:
                if self._expected.get((key, server), now_s + 1) <= now_s:
                    self._unexpect(key, server)


def _note(found: dict[int, int], bits: int, tokens: int) -> None:
    """The servers of these bits have so many tokens."""
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = tokens
        bits ^= lowest
