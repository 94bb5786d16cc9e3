"""Daily and concurrent quotas of API keys. Keys are stored as digests only.

    admit(key, reserved) -> refusal | None      settle(key, reserved, used)

A request reserves its prompt and the longest answer that it may get, and settles for what it used, so that requests
at the same time cannot use more than there is. Days are those of UTC. Pure: the clock is handed in.
"""

import re
from functools import lru_cache
from hashlib import sha256
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from cairn.serve.request_key import given_key

DAY_S = 86_400
ANYBODY = "anybody"  # sends no key
MOST_KEYS = 10_000  # that are counted: those that use least are forgotten first
# Headers that may carry a key.
_SENT = re.compile(rb"^(authorization|x-api-key):[ \t]*([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
# Bytes of headers whose digest is remembered: those of a connection hardly change.
LONGEST_KNOWN = 1024
Count = Annotated[int, Meta(ge=0)]


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one key, overriding the router's; the file contains its digest instead of the key."""

    name: str
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    requests_per_day: Count | None = None
    tokens_per_day: Count | None = None
    at_once: Count | None = None
    weight: Annotated[float, Meta(gt=0)] = 1.0  # its share, while requests wait for servers


class Limits(NamedTuple):
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    at_once: int | None = None


class Refused(NamedTuple):
    message: str
    code: str
    retry_after_s: int


class Used(msgspec.Struct):
    """Usage of a key today."""

    requests: int = 0
    tokens: int = 0
    reserved: int = 0  # tokens of requests that have not ended
    at_once: int = 0


class Quotas:
    def __init__(self, usual: Limits) -> None:
        self.change(usual, {})
        self.used: dict[str, Used] = {}
        self._day = 0

    def change(self, usual: Limits, keys: dict[str, Limits]) -> None:
        """Other limits; what was used today stays used."""
        self._usual, self._keys = usual, keys
        self.limited = any(limit is not None for one in (usual, *keys.values()) for limit in one)

    def admit(self, key: str, reserved: int, now_s: float) -> Refused | None:
        """`now_s`: seconds since 1970. None: it may go on, and has to be settled."""
        self._turn(now_s)
        used = self._used(key)
        if (refused := self.refusal(used, key, reserved, now_s)) is not None:
            return refused
        used.requests += 1
        used.at_once += 1
        used.reserved += reserved
        return None

    def refusal(self, used: Used, key: str, reserved: int, now_s: float) -> Refused | None:
        """Refusal for a key with this usage, or None. No side effects."""
        limits = self._keys.get(key, self._usual)
        until = DAY_S - int(now_s) % DAY_S
        if limits.at_once is not None and used.at_once >= limits.at_once:
            said = f"this key has {used.at_once} requests at once, its limit is {limits.at_once}"
            return Refused(said, "key_concurrency", 1)
        if limits.requests_per_day is not None and used.requests >= limits.requests_per_day:
            said = (
                f"this key may make {limits.requests_per_day} requests in a day, and has made them"
            )
            return Refused(said, "key_requests", until)
        left = (limits.tokens_per_day or 0) - used.tokens - used.reserved
        if limits.tokens_per_day is not None and left < reserved:
            said = (
                f"this key may use {limits.tokens_per_day} tokens in a day: {max(left, 0)} are left, and the prompt"
                f" with the longest answer that is asked for may take {reserved}"
            )
            if reserved > (limits.tokens_per_day or 0):
                said += "; ask for a smaller max_tokens, on another day it is refused as well"
            return Refused(said, "key_budget", until)
        return None

    def settle(self, key: str, reserved: int, tokens: int, now_s: float) -> None:
        """A request that was admitted has ended."""
        self._turn(now_s)
        used = self._used(key)
        used.at_once = max(used.at_once - 1, 0)
        used.reserved = max(used.reserved - reserved, 0)
        used.tokens += tokens

    def _used(self, key: str) -> Used:
        """Invented keys cost no memory without end, and do not push out one that has used much."""
        if (used := self.used.get(key)) is None:
            if len(self.used) >= MOST_KEYS:
                idle = [
                    one
                    for one, used in self.used.items()
                    if not used.at_once and one not in self._keys
                ]
                idle.sort(key=lambda one: (self.used[one].tokens, self.used[one].requests))
                for one in idle[: MOST_KEYS // 2]:
                    del self.used[one]
            used = self.used[key] = Used()
        return used

    def _turn(self, now_s: float) -> None:
        if (day := int(now_s) // DAY_S) != self._day:
            self._day = day
            for used in self.used.values():
                used.requests = used.tokens = 0
            self.used = {key: used for key, used in self.used.items() if used.at_once}


def digest_of(lines: bytes) -> str:
    """Digest of the key in a request's headers, found by the servers' rule."""
    return _known_digest(lines) if len(lines) <= LONGEST_KNOWN else _digest(lines)


def _digest(lines: bytes) -> str:
    key = given_key((name.lower(), value) for name, value in _SENT.findall(lines))
    return sha256(key).hexdigest() if key is not None else ANYBODY


_known_digest = lru_cache(1024)(_digest)
