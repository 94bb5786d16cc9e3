"""Drafts that hold as often as asked for, whatever the model draws: to measure an engine with random weights.

    rates       unconditional, by position: 0.8 0.6 0.3 says how often the first, two and three drafts hold
    a length    tokens that a step brings on average, the one that is always drawn included; becomes such rates

An answer then consists of drafts as far as those "hold", so it means nothing. Everything else is as it is served: the
drafter is asked, its drafts are computed, draws are brought to the host. Where the device drafts, the draws are changed
there (`kernels.synthetic_draws`), and what runs ahead of them goes on from those; else nothing may run ahead of drafts.
"""

import itertools
import math
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from cairn.core.errors import UsageError
from cairn.serve.engine.request import MOST_DRAFTS
from cairn.serve.engine.speculate.drafter import Ask, Drafter

if TYPE_CHECKING:
    from torch import Tensor

    from cairn.serve.engine.request import Request
    from cairn.serve.engine.runner import Runner
    from cairn.serve.engine.speculate.speculation import Speculation

USUAL_DRAFTS = 4  # of a step, where only a length says how many there should be


class PaddedDrafter:
    """A drafter whose proposals are filled up, so that every step verifies as many drafts as it may."""

    def __init__(self, drafter: Drafter, vocabulary: int) -> None:
        self.drafter, self.vocabulary = drafter, vocabulary

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        proposed = self.drafter.propose(asks)
        return [self._filled(ask, tokens) for ask, tokens in zip(asks, proposed, strict=True)]

    def finish(self, request: "Request") -> None:
        self.drafter.finish(request)

    def _filled(self, ask: Ask, tokens: Sequence[int]) -> list[int]:
        first = ask.request.known + len(tokens)
        missing = range(first, first + ask.most - len(tokens))
        return [*tokens, *(at % self.vocabulary for at in missing)]


class SyntheticAcceptance:
    """`Speculation.accept` by chance: the same request gets the same run at the same place."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.rates = rates

    def __call__(
        self, request: "Request", drawn: Sequence[int], drafts: Sequence[int]
    ) -> list[int]:
        chance = random.Random(f"{request.arrival} {len(request.outputs)}").random()
        held = sum(chance < rate for rate in self.rates[: len(drafts)])
        return [*drafts[:held], drawn[held]]


def make_synthetic(speculation: "Speculation", rates: Sequence[float], vocabulary: int) -> None:
    """Simulate acceptance on the host, in place of the sampled tokens."""
    speculation.drafter = PaddedDrafter(speculation.drafter, vocabulary)
    speculation.accept = SyntheticAcceptance(rates)


def make_synthetic_on_device(runner: "Runner", rates: Sequence[float]) -> "Tensor":
    """Call it before graphs are captured. Returns the rows' counts of steps: at zero, runs come again as they were."""
    import torch

    from cairn.kernels.sampling.synthetic_draws import synthetic_draws

    rates_K = torch.tensor(rates, dtype=torch.float32, device=runner.device)
    steps_N = torch.zeros(runner.limits.rows, dtype=torch.int32, device=runner.device)
    runner.alter_draws = lambda drawn: synthetic_draws(drawn, rates_K, steps_N)
    return steps_N


def read_rates(text: str, drafts: int | Literal["auto"]) -> list[float]:
    """Parse acceptance rates of `drafts` positions, or one acceptance length above 1; `auto` derives the positions."""
    try:
        values = [float(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise _wrong(text, drafts) from None
    if drafts == "auto":
        return read_rates(text, _drafts_needed(values))
    if len(values) == 1 and 1 < values[0] <= 1 + drafts:
        return rates_of_length(values[0], drafts)
    falling = all(a >= b for a, b in itertools.pairwise(values))
    if len(values) != drafts or not falling or not all(0 <= rate <= 1 for rate in values):
        raise _wrong(text, drafts)
    return values


def rates_of_length(length: float, drafts: int) -> list[float]:
    """Each draft holds with the same chance, if those before it do; their sum is length - 1."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if sum(middle**n for n in range(1, drafts + 1)) < length - 1:
            low = middle
        else:
            high = middle
    return [high**n for n in range(1, drafts + 1)]


def _drafts_needed(values: Sequence[float]) -> int:
    """Number of drafts: one for each rate; for a length, a few more than the average."""
    if len(values) == 1 and values[0] > 1:
        return math.ceil(min(max(values[0], USUAL_DRAFTS), MOST_DRAFTS))
    return min(max(len(values), 1), MOST_DRAFTS)


def _wrong(text: str, drafts: int | Literal["auto"]) -> UsageError:
    most = MOST_DRAFTS if drafts == "auto" else drafts
    rates = "rates" if drafts == "auto" else "1 rate" if drafts == 1 else f"{drafts} rates"
    return UsageError(
        f"--synthetic-acceptance is {text!r}",
        hint=f"give {rates} that do not grow, such as 0.8,0.6,..., or one length above 1, up to {1 + most}",
    )
