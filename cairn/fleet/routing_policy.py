"""Routing policies: pure functions over numbers, shared by the router and the simulator.

    Ask (prompt tokens, ...) + Candidate (what is cached there, queued, running, how fast) -> order of preference

    seconds      how much later tokens come: its own first one, and those of all others there. No weights
    lmetric      new prompt tokens x requests there (arXiv 2603.15202)
    dynamo       blocks to prefill + blocks that decode (NVIDIA Dynamo's KV router, default weights)
    llmd         queue 2, cache use 2, prefix 3, each scaled to 0..1 (llm-d's default profile)
    cache_aware  the longest match if more than half of the prompt is there and load is even, else the shortest queue
    two_choices  the shorter queue of two random ones
    round_robin  one after the other

Every rule returns one cost for each candidate; the lowest is best, ties go to the fewest requests.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from math import inf

import msgspec

from cairn.fleet.decode_interference import MOST_WAIT, MOST_WAITED, Answers

BLOCK_TOKENS = 64  # of Dynamo's and llm-d's rules
OUTPUT_TOKENS = 256  # of an answer of unknown length
LAST_ARRIVALS = 64  # that a rate is counted over
MOST_BUSY = 0.95  # with more work than that a queue would never be empty


class Ask(msgspec.Struct, frozen=True, gc=False):
    """Properties of a request before it runs."""

    number: int  # in order of arrival
    prompt_tokens: int
    output_tokens: int = OUTPUT_TOKENS  # at most, or expected; 0: nothing is computed
    arrivals_per_s: float = 0.0  # requests that come to one server, on average
    busy_share: float = 0.0  # of a server's time that they take
    seen_s: float = inf  # over which both were counted
    waited_s: float = inf  # in the router, since it came; inf: it is sent now, wherever


def sent_at_once(ask: Ask) -> Ask:
    """The same of a request that waits no longer, such as one whose server was lost."""
    return ask if ask.waited_s == inf else msgspec.structs.replace(ask, waited_s=inf)


class Candidate(msgspec.Struct, gc=False):
    """A server, as a policy sees it at the moment of the decision."""

    cached_tokens: int = 0  # of this prompt
    queued_tokens: int = 0  # of prompts that were sent there and have no first token yet
    running: int = 0  # requests that decode
    waiting: int = 0  # requests before their first token
    rows: int = 256  # most requests that run at the same time
    free_share: float = 1.0  # of the pages of its cache
    step_s: float = 0.02  # of a step that only decodes
    token_s: float = 25e-6  # what a prompt token adds to a step
    row_s: float = 1e-4  # what a request adds to a step
    step_tokens: int = 0  # of prompts, in a step beside answers; 0: it has not told
    answers: Answers | None = None  # of all requests there; None: only their number is known

    @property
    def requests(self) -> int:
        return self.running + self.waiting


Costs = list[float]
Policy = Callable[[Ask, Sequence[Candidate]], Costs]


def seconds(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    """Cost of each server: delay per answer token over all affected answers.

    first      its own wait: prompts before it, its own prompt, a step
    behind     who arrives before the queue is empty waits for its prompt: B seconds of prompts are there already, so
               arrivals in B wait for all of it (p), and arrivals in p for half of it. They bring work themselves, so
               a server that is busy for a share of its time needs 1 / (1 - share) times as long to be empty. But a
               rush is believed to go on only for as long again as it was seen: who counts on one that never ends
               keeps all queues alike, and then all wait too long, where some could have been served in time
    answering  each request there gets the tokens behind this moment later, by its prompt once and by its row in
               every step, and it gets its own later by theirs. They are in the middle of answers on average: half.
               Where they are known each one counts for itself, and the prompt may wait until short ones have ended
    """
    costs: Costs = []
    busy = ask.busy_share if ask.busy_share < MOST_BUSY else MOST_BUSY
    grows, seen_s, per_s = busy / (1 - busy), ask.seen_s, ask.arrivals_per_s
    prompt_tokens, output_tokens = ask.prompt_tokens, ask.output_tokens
    for one in candidates:
        new, token_s = prompt_tokens - one.cached_tokens, one.token_s
        requests = one.running + one.waiting
        prompt_s = (new if new > 1 else 1) * token_s  # `max` would cost more than the rest of it
        queued_s = one.queued_tokens * token_s
        first_s = queued_s + prompt_s + one.step_s
        if requests >= one.rows:
            # It waits until one of the running ends, which happens `rows` times in the time of an answer.
            first_s += (requests + 1 - one.rows) * OUTPUT_TOKENS * one.step_s / one.rows
        lasts_s = queued_s + prompt_s / 2
        more_s = lasts_s * grows
        lasts_s += more_s if more_s < seen_s else seen_s
        behind_s = per_s * prompt_s * lasts_s
        if one.answers is not None and one.step_tokens:
            answering_s = requests * output_tokens * one.row_s / 2 + _beside(ask, one)[1]
        else:
            answering_s = requests * (prompt_s + output_tokens * one.row_s) / 2
        costs.append(first_s + behind_s + answering_s)
    return costs


def wait_for_answers_s(ask: Ask, one: Candidate) -> float:
    """Time that this prompt should wait for short answers of this server; 0 to send it."""
    return _beside(ask, one)[0] if one.step_tokens else 0.0


def _beside(ask: Ask, one: Candidate) -> tuple[float, float]:
    """Optimal wait of a prompt for this server, and the cost including delays of answers."""
    if one.answers is None:
        return 0.0, 0.0
    prompt_s = max(ask.prompt_tokens - one.cached_tokens, 1) * one.token_s
    queued_s, chunk_s = one.queued_tokens * one.token_s, one.step_tokens * one.token_s
    busy = min(ask.busy_share, MOST_BUSY)

    def behind_s(taken_s: float) -> float:
        lasts_s = queued_s + taken_s / 2
        more_s = min(lasts_s * busy / (1 - busy), ask.seen_s)
        return ask.arrivals_per_s * taken_s * (lasts_s + more_s)

    def cost_of(waits_s: float) -> float:
        return waits_s + behind_s(prompt_s + waits_s) - behind_s(prompt_s)

    most_s = MOST_WAIT * prompt_s if ask.waited_s < MOST_WAITED * prompt_s else 0.0
    waits_s, cost_s = one.answers.wait(prompt_s, chunk_s, one.step_s, most_s, cost_of)
    others = max(
        one.requests - len(one.answers.tokens_left), 0
    )  # of which only the number is known
    return waits_s, cost_s + others * prompt_s / 2


class Arrivals:
    """Requests that came last: how many in a second, and how much work they bring."""

    def __init__(self) -> None:
        self._times = deque[float](maxlen=LAST_ARRIVALS)
        self._work = deque[float]([0.0], maxlen=LAST_ARRIVALS)  # seconds, of as many
        self._work_s = 0.0  # of all of them

    def ask(
        self,
        number: int,
        prompt: int,
        output: int,
        now_s: float,
        share: float,
        waited_s: float = inf,
    ) -> Ask:
        """Record an arrival. `share` is the mean share of arrivals per server."""
        times = self._times
        times.append(now_s)
        took_s = now_s - times[0]
        per_s = share * (len(times) - 1) / took_s if took_s > 0 else 0.0
        busy = per_s * self._work_s / len(self._work)
        return Ask(number, prompt, output, per_s, busy, took_s, waited_s)

    def sent(self, ask: Ask, chosen: Candidate) -> None:
        """Record the work of a sent request: its prompt, and its row in every step."""
        new, work = ask.prompt_tokens - chosen.cached_tokens, self._work
        seconds = (new if new > 1 else 1) * chosen.token_s + ask.output_tokens * chosen.row_s
        if len(work) == LAST_ARRIVALS:
            self._work_s -= work[0]
        work.append(seconds)
        self._work_s += seconds


def lmetric(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    return [
        (max(ask.prompt_tokens - one.cached_tokens, 1) + one.queued_tokens) * (one.requests + 1)
        for one in candidates
    ]


def dynamo(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    def blocks(tokens: float) -> float:
        return tokens / BLOCK_TOKENS

    return [
        blocks(max(ask.prompt_tokens - one.cached_tokens, 0) + one.queued_tokens)
        + blocks(one.running * (ask.prompt_tokens + ask.output_tokens / 2))
        for one in candidates
    ]


def llmd(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    longest = max(one.waiting for one in candidates)
    shortest = min(one.waiting for one in candidates)
    spread = max(longest - shortest, 1)
    return [
        -(
            2 * (longest - one.waiting) / spread
            + 2 * one.free_share
            + 3 * one.cached_tokens / max(ask.prompt_tokens, 1)
        )
        for one in candidates
    ]


def cache_aware(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    loads = [one.requests for one in candidates]
    uneven = max(loads) - min(loads) > 32 and max(loads) > 1.1 * min(loads)
    best = max(one.cached_tokens for one in candidates)
    if uneven or best <= 0.5 * ask.prompt_tokens:
        return [float(load) for load in loads]
    return [float(best - one.cached_tokens) for one in candidates]


def two_choices(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    pair = random.Random(ask.number).sample(range(len(candidates)), min(2, len(candidates)))
    return [
        float(one.requests) if at in pair else 1e9 + one.requests
        for at, one in enumerate(candidates)
    ]


def round_robin(ask: Ask, candidates: Sequence[Candidate]) -> Costs:
    return [float((at - ask.number) % len(candidates)) for at in range(len(candidates))]


POLICIES: dict[str, Policy] = {
    rule.__name__: rule
    for rule in (seconds, lmetric, dynamo, llmd, cache_aware, two_choices, round_robin)
}


def best(policy: Policy, ask: Ask, candidates: Sequence[Candidate]) -> tuple[int, Costs]:
    """The place of the best candidate, and what each of them costs."""
    costs = policy(ask, candidates)
    least = min(costs)
    place = costs.index(least)
    if costs.count(least) > 1:
        fewest = candidates[place].requests
        for at in range(place + 1, len(costs)):
            if costs[at] == least and (requests := candidates[at].requests) < fewest:
                place, fewest = at, requests
    return place, costs
