"""Late binding of waiting requests: a server gets a prompt shortly before it becomes idle.

    arrival --best server computes other prompts--> waits in the router        (a prompt that was sent is bound)
    waiting, in order --bind--> the first one whose best server is about to run dry

Where queues are at the servers, a prompt waits behind a long one while another server has become free, and a server
with a queue has prompts in every step, which slows all its answers. Here the choice is made as late as it can be
without a server standing still, and again for all that wait. Short prompts go before long ones that have not
waited for long, and none starves: the order is between that of arrival and that of the highest response ratio. Those
who go before a request count as if they were at the servers that they would go to. A long prompt also waits for short
answers to end beside which it would be computed (`decode_interference`). Only of streams a router sees when their
prompts are computed, so only these wait. Pure: the clock is handed in.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf, sqrt
from typing import Generic, Protocol, TypeVar

import msgspec

from cairn.fleet.decode_interference import Answers
from cairn.fleet.index import KeyIndex
from cairn.fleet.routing_policy import Ask, Candidate, Policy, best, wait_for_answers_s
from cairn.fleet.worker import Worker, candidates
from cairn.serve.text_keys import PromptKeys

LATE = frozenset({"seconds"})  # policies that bind late; the published ones send at once
AHEAD_STEPS = 2  # that a server has prompts for: the one that it computes, and the next
LOOKED_AT = 32  # requests of those that wait, in one decision
OLDEST = 128  # of those that wait, that are put in order


class Waiting(Protocol):
    """A request that waits."""

    @property
    def ask(self) -> Ask: ...

    @property
    def keys(self) -> PromptKeys: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def new_tokens(self) -> int:
        """Prompt tokens to compute on the best server at arrival."""
        ...


W = TypeVar("W", bound=Waiting)


class Binding(msgspec.Struct, Generic[W], frozen=True, gc=False):
    """A request, and where it goes."""

    request: W
    place: int
    seen: list[Candidate]
    costs: list[float]


def runs_dry(worker: Worker) -> bool:
    """Has it prompts for less than its next steps? One that has told no size of its steps gets its prompts at once."""
    return not worker.step_tokens or worker.stream_tokens < AHEAD_STEPS * worker.step_tokens


def answers_beside(ask: Ask, workers: Sequence[Worker]) -> list[Answers]:
    """Remaining answers of each server if the prompt may take several steps; otherwise empty."""
    if ask.waited_s < inf and any(0 < one.step_tokens < ask.prompt_tokens for one in workers):
        return [one.answers for one in workers]
    return []


def in_order(waiting: Iterable[W], now_s: float) -> list[W]:
    """Order the oldest requests by wait over the square root of their prompt tokens."""
    oldest = islice(waiting, OLDEST)
    return sorted(oldest, key=lambda one: (one.arrived_s - now_s) / sqrt(max(one.new_tokens, 1)))


def bind(
    waiting: Iterable[W],
    workers: Sequence[Worker],
    index: KeyIndex,
    policy: Policy,
    now_s: float,
) -> Binding[W] | None:
    """The first of these requests, in their order, whose best server is about to run dry."""
    dry = [runs_dry(one) for one in workers]
    tokens, requests = [0] * len(workers), [0] * len(workers)  # of those before it
    answers = [one.answers for one in workers]
    for looked, one in enumerate(waiting):
        if looked == LOOKED_AT or not any(dry):
            return None
        keys = one.keys
        found = index.match(keys.keys, keys.tokens, now_s) if keys.keys else {}
        seen = candidates(workers, found, answers)
        for at, candidate in enumerate(seen):
            candidate.queued_tokens += tokens[at]
            candidate.waiting += requests[at]
        ask = one.ask
        if ask.waited_s < inf:
            ask = msgspec.structs.replace(ask, waited_s=now_s - one.arrived_s)
        place, costs = best(policy, ask, seen)
        if dry[place] and not wait_for_answers_s(ask, seen[place]):
            return Binding(one, place, seen, costs)
        tokens[place] += max(ask.prompt_tokens - seen[place].cached_tokens, 1)
        requests[place] += 1
        answers[place] = answers[place].plus(ask.output_tokens)
    return None
