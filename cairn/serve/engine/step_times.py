"""Contents and timings of steps.

    StepTimes   one step                                      the newest ones are remembered
    Spent       all steps up to now; later minus earlier:     what was computed while a request was in a phase

A request keeps the totals of the moment when it began to wait for its first token, and of its first token; that is all
it takes to know later what the engine did meanwhile, so nothing is counted for each request in each step. Needs no
torch: crosses the border of the engine's process.
"""

from typing import NamedTuple

import msgspec


class StepTimes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Host timings of a step in seconds, and its contents in tokens."""

    number: int
    sequences: int
    tokens: int
    schedule: float
    launch: float
    wait: float  # for the device
    update: float
    ended: float  # on the loop's clock
    prefill: int = 0  # of the tokens, those known before: of prompts, or again after a preemption
    sampled: int = 0
    read: int = 0  # entries of the cache that attention looks at, summed over the sequences
    pairs: int = 0  # of a query and a key

    @property
    def total(self) -> float:
        return self.schedule + self.launch + self.wait + self.update


class Spent(NamedTuple):
    """Totals since the engine began, or the difference of two of them."""

    steps: int = 0
    tokens: int = 0
    prefill: int = 0
    sampled: int = 0
    read: int = 0
    pairs: int = 0
    host: float = 0.0  # seconds in which the loop decided, prepared and took in
    device: float = 0.0  # seconds in which it computed, or waited for the device that did

    def plus(self, more: "Spent") -> "Spent":
        return Spent(
            self.steps + more.steps,
            self.tokens + more.tokens,
            self.prefill + more.prefill,
            self.sampled + more.sampled,
            self.read + more.read,
            self.pairs + more.pairs,
            self.host + more.host,
            self.device + more.device,
        )

    def since(self, earlier: "Spent") -> "Spent":
        return Spent(
            self.steps - earlier.steps,
            self.tokens - earlier.tokens,
            self.prefill - earlier.prefill,
            self.sampled - earlier.sampled,
            self.read - earlier.read,
            self.pairs - earlier.pairs,
            self.host - earlier.host,
            self.device - earlier.device,
        )


NOTHING = Spent()
