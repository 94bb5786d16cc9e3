"""Estimated time to recompute blocks: FLOPs at this machine's rate, corrected by measured steps.

The rate begins as the measured one of large products, or a usual share of the vendor's; where neither is known, as on a
CPU, nothing is said before a step with a prompt has been timed. Causal attention adds up: the cost of a range is the
difference of two prefixes.
"""

import functools

from cairn.models.spec import ModelSpec
from cairn.serve.engine.step import Step
from cairn.serve.engine.step_budget import OF_LARGE

LEAST_TOKENS = 32  # of a step that tells something about prompts
NEWEST = 0.3
WITHIN = 3.0  # a step is not believed to be so much slower or faster than the machine: it may have compiled


class Recompute:
    def __init__(self, spec: ModelSpec, page_size: int, rate: float | None = None) -> None:
        """`rate`: FLOP/s of products, None where it is not known."""
        self._spec, self._size = spec, page_size
        self._known = rate * OF_LARGE if rate is not None else None
        self.rate = self._known
        self._flops = functools.cache(self._flops_before)

    def __call__(self, first: int, last: int) -> float:
        """Seconds of the pages `first` .. `last`; 0 while the machine is unknown, so that nothing is loaded."""
        if self.rate is None or last <= first:
            return 0.0
        return (self._flops(last) - self._flops(first)) / self.rate

    def note(self, step: Step, seconds: float) -> None:
        """A step took so long."""
        if seconds <= 0 or step.prefill < max(LEAST_TOKENS, 0.8 * step.tokens):
            return
        flops = sum(
            self._spec.forward_flops(one.count, one.start, one.samples) for one in step.chunks
        )
        rate = flops / seconds
        if self._known is not None:
            rate = min(max(rate, self._known / WITHIN), self._known * WITHIN)
        self.rate = rate if self.rate is None else self.rate + NEWEST * (rate - self.rate)

    def _flops_before(self, place: int) -> int:
        return self._spec.forward_flops(place * self._size, 0, 0)
