"""Simulation of a fleet on a trace under each policy, with the router's policies and the engine's schedulers.

    trace --> KeyIndex.match, choose --> Replica: Scheduler, step_seconds, its own clock --> Outcome
                  ^------ KeyBook: what its prefix cache stored and dropped ------'

Only the devices and the network are replaced: a step takes what the planner's cost model says, and events of the cache
are known at the next arrival, or when one that waits is sent.
"""

from collections.abc import Sequence
from math import inf
from typing import Protocol

import msgspec

from cairn.fleet.deadlines import by_deadline
from cairn.fleet.index import KeyIndex
from cairn.fleet.late_binding import LATE, answers_beside, bind, runs_dry
from cairn.fleet.routing_policy import POLICIES, Arrivals, Ask, Candidate, best, wait_for_answers_s
from cairn.fleet.simulate_prompts import Prompt
from cairn.fleet.simulate_replica import PROBE_ROWS, Replica, Speed, StepSeconds, speed_of
from cairn.fleet.worker import candidates
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.pulse import Events
from cairn.serve.text_keys import PromptKeys


class Slo(Protocol):
    """Latency limits of a good request."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A whole trace under one policy."""

    policy: str
    load: float  # of what the servers could compute if nothing were cached
    requests: int
    seconds: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p50_s: float
    tpot_p99_s: float
    good_share: float  # of the requests that held the SLO
    goodput: float  # of those, a second
    hit_share: float  # of prompt tokens that were cached
    busiest: float  # over the mean, in seconds of work


def run_policy(
    policy: str,
    prompts: Sequence[Prompt],
    load: float,
    servers: int,
    limits: Limits,
    step_seconds: StepSeconds,
    slo: Slo,
) -> Outcome:
    """The whole trace, at the rate that makes this load."""
    speed = speed_of(step_seconds)
    replicas = [Replica(number, limits, step_seconds, speed) for number in range(servers)]
    simulated = Simulated(policy, limits)
    for replica in replicas:
        simulated.join(replica)
    slower = span_s(prompts, speed, servers, load) / max(prompts[-1].traced.at_s, 1e-9)
    for prompt in prompts:
        at_s = prompt.traced.at_s * slower
        simulated.advance(at_s)
        simulated.place(prompt, at_s, at_s)
    simulated.advance(inf)
    return outcome_of(policy, load, simulated.requests, replicas, slo)


class Waiting(msgspec.Struct, frozen=True, gc=False):
    """A request that waits in the router, because its best server computes other prompts."""

    prompt: Prompt
    ask: Ask
    keys: PromptKeys
    arrived_s: float
    new_tokens: int


class Simulated:
    """A router over replicas that come and go."""

    def __init__(self, policy: str, limits: Limits, ttft_s: float = inf) -> None:
        """`ttft_s`: within which first tokens are due."""
        self.ttft_s = ttft_s
        self.rule, self.limits, self.late = POLICIES[policy], limits, policy in LATE
        self.index, self.arrivals = KeyIndex(), Arrivals()
        self.replicas: list[Replica] = []  # that take requests
        self.leaving: list[Replica] = []  # that finish what they have
        self.requests: list[Request] = []  # that were sent
        self.waiting: list[Waiting] = []  # oldest first
        self._placed = 0

    def join(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self.index.note(replica.worker.number, Events(0))

    def leave(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self.leaving.append(replica)
        self.index.forget(replica.worker.number)

    def advance(self, until_s: float) -> None:
        while self.waiting and self._advance_one(until_s):
            pass
        for replica in (*self.replicas, *self.leaving):
            replica.advance(until_s)
        self._note_events()

    def _advance_one(self, until_s: float) -> bool:
        """The next step of all replicas that ends by then, and whom it lets go. It has begun its next one by then."""
        replica = min((*self.replicas, *self.leaving), key=lambda one: one.next_s)
        ends_s = replica.next_s
        if ends_s > until_s:
            return False
        if ends_s == inf:  # those that still wait have been left alone
            self._send_waiting(max(one.now for one in self.replicas))
            return True
        replica.land()
        _ = replica.next_s
        self._send_waiting(ends_s)
        return True

    def _note_events(self) -> None:
        for replica in self.replicas:
            if (events := replica.events()) is not None:
                self.index.note(replica.worker.number, events)

    def place(self, prompt: Prompt, arrived_s: float, now_s: float) -> int:
        """Returns how many tokens of the prompt have to be computed."""
        found = self.index.match(prompt.keys, prompt.tokens, now_s)
        workers = [one.worker for one in self.replicas]
        traced, share = prompt.traced, 1 / len(self.replicas)
        number, self._placed = self._placed, self._placed + 1
        late = self.late and (len(workers) > 1 or self.ttft_s < inf)
        waited_s = 0.0 if late else inf
        ask = self.arrivals.ask(
            number, traced.input_tokens, traced.output_tokens, now_s, share, waited_s
        )
        seen = candidates(workers, found, answers_beside(ask, workers))
        place, _ = best(self.rule, ask, seen)
        new = max(traced.input_tokens - seen[place].cached_tokens, 1)
        keys = PromptKeys(prompt.keys, prompt.tokens, [], traced.input_tokens)
        one = Waiting(prompt, ask, keys, arrived_s, new)
        waits = self.waiting or not runs_dry(workers[place]) or wait_for_answers_s(ask, seen[place])
        if late and waits:
            self.waiting.append(one)
            self._send_waiting(now_s)
        else:
            self._send(one, place, seen, now_s)
        return new

    def _send_waiting(self, now_s: float) -> None:
        workers = [one.worker for one in self.replicas]
        while self.waiting and workers and any(map(runs_dry, workers)):
            self._note_events()
            order = by_deadline(self.waiting, workers, self.ttft_s, now_s)
            if (bound := bind(order, workers, self.index, self.rule, now_s)) is None:
                return
            self.waiting.remove(bound.request)
            self._send(bound.request, bound.place, bound.seen, now_s)

    def _send(self, one: Waiting, place: int, seen: Sequence[Candidate], now_s: float) -> None:
        chosen, prompt = self.replicas[place], one.prompt
        self.arrivals.sent(one.ask, seen[place])
        self.index.expect(chosen.worker.number, prompt.keys, now_s)
        request = _request(one.ask.number, prompt, self.limits)
        self.requests.append(request)
        chosen.add(request, prompt, seen[place].cached_tokens, now_s)
        request.ledger.arrived = one.arrived_s


def _request(number: int, prompt: Prompt, limits: Limits) -> Request:
    traced = prompt.traced
    params = SamplingParams(max_tokens=traced.output_tokens, ignore_eos=True)
    made = Request(number, [1] * traced.input_tokens, params)
    made.hashes = list(prompt.hashes)
    made.salt = str(number)  # pages behind the prompt are shared with no other
    made.checked = traced.input_tokens + traced.output_tokens <= limits.context
    return made


def span_s(prompts: Sequence[Prompt], speed: Speed, servers: int, load: float) -> float:
    """Seconds in which all requests come, so that the servers are busy for this share of them without any cache."""
    work_s = sum(
        one.traced.input_tokens * speed.token_s
        + one.traced.output_tokens * speed.step_s / PROBE_ROWS
        for one in prompts
    )
    return work_s / (servers * load)


def recorded_load(prompts: Sequence[Prompt], speed: Speed, servers: int) -> float:
    """The load of a trace whose requests come at their own times."""
    return span_s(prompts, speed, servers, 1.0) / max(prompts[-1].traced.at_s, 1e-9)


def outcome_of(
    policy: str, load: float, requests: Sequence[Request], replicas: Sequence[Replica], slo: Slo
) -> Outcome:
    first = [one.ledger.first_token - one.ledger.arrived for one in requests]
    each = [
        (one.ledger.finished - one.ledger.first_token) / max(len(one.outputs) - 1, 1)
        for one in requests
    ]
    good = sum(a <= slo.ttft_s and b <= slo.tpot_s for a, b in zip(first, each, strict=True))
    began_s = min(one.ledger.arrived for one in requests)
    seconds = max(one.ledger.finished for one in requests) - began_s
    asked = sum(len(one.prompt) for one in requests)
    busy = [one.busy for one in replicas]
    first.sort()
    each.sort()
    return Outcome(
        policy=policy,
        load=load,
        requests=len(requests),
        seconds=seconds,
        ttft_p50_s=_at(first, 0.5),
        ttft_p99_s=_at(first, 0.99),
        tpot_p50_s=_at(each, 0.5),
        tpot_p99_s=_at(each, 0.99),
        good_share=good / len(requests),
        goodput=good / seconds,
        hit_share=sum(one.cached for one in requests) / asked,
        busiest=max(busy) * len(busy) / max(sum(busy), 1e-9),
    )


def _at(values: Sequence[float], share: float) -> float:
    """Quantile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
