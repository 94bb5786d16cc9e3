"""Prefix index: the cached part of a prompt on each server, updated by the servers' events.

    stored(3, [(key, tokens), ...])   removed(3, [key])   forget(3)       numbered events; a gap makes a server unknown
    match(keys) -> {server: cached tokens}

A key holds a bit for each server. `match` goes along the prompt and keeps the bits that all keys so far have, so it
ends where no server has more. Decisions that were just made count as if the server had stored the keys already, until
its events come or they expire: siblings of a burst go to the same place. Pure; the clock is handed in.
"""

from collections.abc import Iterable, Sequence

from cairn.serve.pulse import Events

EXPECTED_S = 10.0  # that a decision counts without an event, at most; half of it at least


class KeyIndex:
    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # key -> bits of the servers that have it
        self._tokens: dict[int, int] = {}  # key -> tokens cached up to it
        self._keys_of: dict[int, set[int]] = {}  # server -> its keys
        self._next: dict[int, int] = {}  # server -> number of the event that comes next
        self._broken: set[int] = set()  # servers of which an event is missing
        # Key -> bits of the servers to which it was just sent: of this half of EXPECTED_S, and of the one before.
        self._expected: dict[int, int] = {}
        self._expected_before: dict[int, int] = {}
        self._half_ends_s = 0.0

    def __len__(self) -> int:
        return len(self._holders)

    def count(self, server: int) -> int:
        """Number of keys of a server."""
        return len(self._keys_of.get(server, ()))

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
        """Forget a server that was restarted or whose events are incomplete."""
        self._drop(server, list(self._keys_of.pop(server, ())))
        self._next.pop(server, None)
        self._broken.discard(server)
        others = ~(1 << server)
        for expected in (self._expected, self._expected_before):
            left = {key: bits & others for key, bits in expected.items() if bits & others}
            expected.clear()
            expected.update(left)

    def expect(self, server: int, keys: Sequence[int], now_s: float) -> None:
        """A prompt with these keys was just sent there."""
        if now_s >= self._half_ends_s:
            self._expire(now_s)
        bit, expected = 1 << server, self._expected
        for key in keys:
            expected[key] = expected.get(key, 0) | bit

    def match(
        self, keys: Sequence[int], estimates: Sequence[int], now_s: float = 0.0
    ) -> dict[int, int]:
        """Cached tokens by server. `estimates[i]`: tokens up to key i, for keys that were not counted yet."""
        if now_s >= self._half_ends_s:
            self._expire(now_s)
        holders, expected, before = self._holders, self._expected, self._expected_before
        found: dict[int, int] = {}
        bits, tokens = -1, 0  # -1: all, until one has a key
        for at, key in enumerate(keys):
            here = holders.get(key, 0) | expected.get(key, 0) | before.get(key, 0)
            if not here and bits == -1:
                continue  # before the first full page there is nothing to store
            if bits != here:
                if bits != -1:
                    _note(found, bits & ~here, tokens)
                bits &= here
                if not bits:
                    return found
            tokens = self._tokens.get(key) or estimates[at]
        if bits > 0:
            _note(found, bits, tokens)
        return found

    # -- inside ----------------------------------------------------------------------------------

    def _store(self, server: int, stored: Iterable[tuple[int, int]]) -> None:
        bit, own = 1 << server, self._keys_of.setdefault(server, set())
        for key, tokens in stored:
            self._holders[key] = self._holders.get(key, 0) | bit
            self._tokens[key] = max(tokens, 0)  # what one server tells counts for all that have it
            own.add(key)
            if key in self._expected or key in self._expected_before:
                self._unexpect(key, ~bit)

    def _drop(self, server: int, keys: Iterable[int]) -> None:
        bit, own = 1 << server, self._keys_of.get(server, set())
        for key in keys:
            own.discard(key)
            left = self._holders.get(key, 0) & ~bit
            if left:
                self._holders[key] = left
            elif key in self._holders:
                del self._holders[key], self._tokens[key]

    def _unexpect(self, key: int, others: int) -> None:
        """`others`: the bits that stay."""
        for expected in (self._expected, self._expected_before):
            if left := expected.get(key, 0) & others:
                expected[key] = left
            else:
                expected.pop(key, None)

    def _expire(self, now_s: float) -> None:
        """The half is over. After a pause of another one nothing is left."""
        half_s = EXPECTED_S / 2
        late = now_s >= self._half_ends_s + half_s
        self._expected_before = {} if late else self._expected
        self._expected, self._half_ends_s = {}, (now_s if late else self._half_ends_s) + half_s


def _note(found: dict[int, int], bits: int, tokens: int) -> None:
    """The servers of these bits have so many tokens."""
    while bits:
        lowest = bits & -bits
        found[lowest.bit_length() - 1] = tokens
        bits ^= lowest
