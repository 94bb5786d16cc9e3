"""Metering: tokens, device seconds and joules of each request and key. Pure: totals in, shares out.

    tick    the engine computed for 0.83 s and the device took 412 J since the last tick; these requests advanced:
            a 120 tokens, b 40 tokens   -->   a gets 3/4 of both, b 1/4; without requests, it is idle
            a is there, and no token has come yet (a long prompt)   -->   kept for the next tick that brings some

Nothing is estimated twice: the shares of a tick add up to what was measured in it, so requests, keys and the idle rest
add up to the engine's totals and to the energy counter of the device. A token counts the same in prompt and answer.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

DAY_S = 86_400.0


class Usage(msgspec.Struct, kw_only=True):
    """Usage of a key since the server started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of those, found in the prefix cache
    output_tokens: int = 0
    device_s: float = 0.0
    joules: float = 0.0
    today_tokens: int = 0  # prompt and output, of the running day (UTC)


class Advanced(NamedTuple):
    """Progress of a request since the last tick."""

    key: str
    tokens: int
    bill: Callable[[float, float], None]  # takes its device-seconds and joules


class Meter:
    def __init__(self, tokens_per_day: int | None = None) -> None:
        self.tokens_per_day = tokens_per_day
        self.keys: dict[str, Usage] = {}
        self.idle_s = self.idle_joules = 0.0  # that no request was there for
        self._kept_s = self._kept_joules = (
            0.0  # of ticks in which there were requests, but no token came
        )
        self._day = 0

    def of(self, key: str) -> Usage:
        return self.keys.setdefault(key, Usage())

    def tick(self, device_s: float, joules: float, advanced: Iterable[Advanced]) -> None:
        there = list(advanced)
        moved = [one for one in there if one.tokens > 0]
        device_s, joules = device_s + self._kept_s, joules + self._kept_joules
        self._kept_s = self._kept_joules = 0.0
        if there and not moved:
            self._kept_s, self._kept_joules = device_s, joules
            return
        if not moved:
            self.idle_s += device_s
            self.idle_joules += joules
            return
        total = sum(one.tokens for one in moved)
        for one in moved:
            seconds, energy = device_s * one.tokens / total, joules * one.tokens / total
            usage = self.of(one.key)
            usage.device_s += seconds
            usage.joules += energy
            one.bill(seconds, energy)

    def count(self, key: str, prompt: int, cached: int, output: int, now: float) -> None:
        """A request has ended. `now`: seconds since the epoch."""
        self._turn(now)
        usage = self.of(key)
        usage.requests += 1
        usage.prompt_tokens += prompt
        usage.cached_tokens += cached
        usage.output_tokens += output
        usage.today_tokens += prompt + output

    def budget_left(self, key: str, now: float) -> int | None:
        """Tokens that a key may still use today; None: there is no limit."""
        if self.tokens_per_day is None:
            return None
        self._turn(now)
        return max(self.tokens_per_day - self.of(key).today_tokens, 0)

    @staticmethod
    def next_day_s(now: float) -> float:
        return DAY_S - now % DAY_S

    def _turn(self, now: float) -> None:
        """A new day begins for all keys at midnight, UTC."""
        day = int(now // DAY_S)
        if day != self._day:
            self._day = day
            for usage in self.keys.values():
                usage.today_tokens = 0
