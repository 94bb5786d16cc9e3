"""How would a fleet serve this trace, under each policy? The router's own parts over the engine's own schedulers.

    trace --> KeyIndex.match, choose --> Replica: Scheduler, step_seconds, its own clock --> Outcome
                  ^------ KeyBook: what its prefix cache stored and dropped ------'

Only the devices and the network are replaced: a step takes what the planner's cost model says, and events of the cache
are known at the next arrival. A block of the trace stands for 512 tokens; equal blocks at the beginning are one prefix.
"""

import itertools
import random
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Protocol

import msgspec

from cairn.bench.arrival_traces import BLOCK_TOKENS, Traced
from cairn.fleet.choose import POLICIES, Arrivals, best
from cairn.fleet.index import KeyIndex
from cairn.fleet.worker import Worker, candidates
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Chunk, Step
from cairn.serve.pulse import Events, Hello, KeyBook, Load, Outbox

StepSeconds = Callable[[Step], float]
PROBE_ROWS, PROBE_CONTEXT = 64, 4096  # of the step that a decoded token's cost is taken from


class Slo(Protocol):
    """What a good request holds."""

    @property
    def ttft_s(self) -> float: ...

    @property
    def tpot_s(self) -> float: ...


class Speed(msgspec.Struct, frozen=True):
    """What a server tells of itself."""

    step_s: float  # of a step that only decodes
    token_s: float  # what a prompt token adds
    row_s: float  # what a request adds to a step that decodes


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


class Prompt(msgspec.Struct, frozen=True):
    """A request of the trace, ready to be hashed."""

    traced: Traced
    keys: list[int]  # at the end of each block
    tokens: list[int]  # up to there
    hashes: list[bytes]  # of its full pages


def prompts_of(
    trace: Sequence[Traced], page_size: int, block_tokens: int = BLOCK_TOKENS
) -> list[Prompt]:
    """Hashes of blocks, and of the pages in them; a block that many share is hashed once."""
    known: dict[tuple[bytes, int], tuple[bytes, list[bytes]]] = {}
    made = []
    for number, one in enumerate(trace):
        parent, keys, hashes = b"", list[int](), list[bytes]()
        for block in one.blocks or (-1 - number,) * -(-one.input_tokens // block_tokens):
            if (parent, block) not in known:
                known[parent, block] = _block(parent, block, max(block_tokens // page_size, 1))
            parent, pages = known[parent, block]
            keys.append(int.from_bytes(parent[:8], "little"))
            hashes += pages
        tokens = [min(block_tokens * (at + 1), one.input_tokens) for at in range(len(keys))]
        made.append(Prompt(one, keys, tokens, hashes[: one.input_tokens // page_size]))
    return made


def _block(parent: bytes, block: int, pages_of_block: int) -> tuple[bytes, list[bytes]]:
    key = blake2b(parent + block.to_bytes(8, "little", signed=True), digest_size=16).digest()
    pages = [
        blake2b(key + at.to_bytes(4, "little"), digest_size=16).digest()
        for at in range(pages_of_block)
    ]
    return key, pages


class Replica:
    """One simulated server, on a clock of its own."""

    def __init__(
        self, number: int, limits: Limits, step_seconds: StepSeconds, speed: Speed
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.worker = Worker(number, f"http://sim:{number + 1}")
        self.worker.up(Hello(0, ["m"], limits.page_size, True, limits.rows))
        self.worker.told(Load(step_s=speed.step_s, token_s=speed.token_s, row_s=speed.row_s))
        self.now = self.busy = 0.0
        self._flying: tuple[Step, float] | None = None  # the step under way, and when it ends
        self._step_seconds = step_seconds
        self._book = KeyBook(limits.page_size)
        self._pages = self.scheduler.blocks.prefix.follow()
        self._prompts: dict[int, tuple[Prompt, int]] = {}  # by request: and its new tokens
        self._outbox = Outbox()

    def add(self, request: Request, prompt: Prompt, cached: int, at_s: float) -> None:
        if not self.scheduler.has_work:
            self.now = max(self.now, at_s)
        new = max(prompt.traced.input_tokens - cached, 1)
        self._prompts[int(request.id)] = prompt, new
        self.worker.waiting += 1
        self.worker.queued_tokens += new
        request.ledger.arrived = at_s
        self.scheduler.add(request)

    def advance(self, until_s: float) -> None:
        """Steps that end by then. What one computes is known at its end, to the router as well."""
        while self._flying is not None or (self.scheduler.has_work and self.now < until_s):
            if self._flying is None:
                step = self.scheduler.schedule()
                self._flying = step, self.now + self._step_seconds(step)
            step, ends = self._flying
            if ends > until_s:
                return
            self._flying = None
            self.busy += ends - self.now
            self.now = ends
            self._land(step)

    def _land(self, step: Step) -> None:
        for advance in self.scheduler.update(step, [0] * len(step.sampling)):
            request = advance.request
            if not request.ledger.first_token:
                self._first(request)
            if advance.finished:
                request.ledger.finished = self.now
                self._end(request)

    def events(self) -> Events | None:
        """What its cache has stored and dropped since the last call."""
        self._outbox.remove(*self._book.note(self._pages.take()))
        return self._outbox.take()

    def _first(self, request: Request) -> None:
        request.ledger.first_token = self.now
        worker, (prompt, new) = self.worker, self._prompts[int(request.id)]
        worker.waiting -= 1
        worker.decoding += 1
        worker.queued_tokens -= new
        self._outbox.remove(*self._book.note(self._pages.take()))
        self._outbox.store(self._book.bind(prompt.keys, prompt.tokens, prompt.hashes))

    def _end(self, request: Request) -> None:
        self.worker.decoding -= 1
        del self._prompts[int(request.id)]


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
    simulated.advance(float("inf"))
    return outcome_of(policy, load, simulated.requests, replicas, slo)


class Simulated:
    """A router over replicas that come and go."""

    def __init__(self, policy: str, limits: Limits) -> None:
        self.rule, self.limits = POLICIES[policy], limits
        self.index, self.arrivals = KeyIndex(), Arrivals()
        self.replicas: list[Replica] = []  # that take requests
        self.leaving: list[Replica] = []  # that finish what they have
        self.requests: list[Request] = []

    def join(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self.index.note(replica.worker.number, Events(0))

    def leave(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self.leaving.append(replica)
        self.index.forget(replica.worker.number)

    def advance(self, until_s: float) -> None:
        for replica in (*self.replicas, *self.leaving):
            replica.advance(until_s)
        for replica in self.replicas:
            if (events := replica.events()) is not None:
                self.index.note(replica.worker.number, events)

    def place(self, prompt: Prompt, arrived_s: float, now_s: float) -> int:
        """Returns how many tokens of the prompt have to be computed."""
        found = self.index.match(prompt.keys, prompt.tokens, now_s)
        seen = candidates([one.worker for one in self.replicas], found)
        number = len(self.requests)
        traced, share = prompt.traced, 1 / len(self.replicas)
        ask = self.arrivals.ask(number, traced.input_tokens, traced.output_tokens, now_s, share)
        place, _ = best(self.rule, ask, seen)
        self.arrivals.sent(ask, seen[place])
        chosen = self.replicas[place]
        self.index.expect(chosen.worker.number, prompt.keys, now_s)
        request = _request(number, prompt, self.limits)
        self.requests.append(request)
        chosen.add(request, prompt, seen[place].cached_tokens, now_s)
        request.ledger.arrived = arrived_s
        return max(prompt.traced.input_tokens - seen[place].cached_tokens, 1)


def _request(number: int, prompt: Prompt, limits: Limits) -> Request:
    traced = prompt.traced
    params = SamplingParams(max_tokens=traced.output_tokens, ignore_eos=True)
    made = Request(number, [1] * traced.input_tokens, params)
    made.hashes = list(prompt.hashes)
    made.salt = str(number)  # pages behind the prompt are nobody else's
    made.checked = traced.input_tokens + traced.output_tokens <= limits.context
    return made


def fitting(trace: Sequence[Traced], context: int) -> list[Traced]:
    """Without the requests that no server could take."""
    return [one for one in trace if one.input_tokens + one.output_tokens <= context]


def speed_of(step_seconds: StepSeconds) -> Speed:
    """As a server would measure it: a decode step of many rows, and what prompt tokens add to it."""

    def step(tokens: int, prompt: int) -> float:
        made = Step(0)
        request = Request(0, [1] * PROBE_CONTEXT, SamplingParams(max_tokens=1))
        made.chunks = [Chunk(request, PROBE_CONTEXT - 1, 1, 0, (), 1) for _ in range(tokens)]
        if prompt:
            made.chunks.append(Chunk(request, 0, prompt, 0, (), 1))
        made.sampling = [request] * len(made.chunks)
        made.tokens = tokens + prompt
        return step_seconds(made)

    decode = step(PROBE_ROWS, 0)
    half = PROBE_ROWS // 2
    row_s = (decode - step(half, 0)) / (PROBE_ROWS - half)
    return Speed(decode, (step(PROBE_ROWS, PROBE_CONTEXT) - decode) / PROBE_CONTEXT, row_s)


def span_s(prompts: Sequence[Prompt], speed: Speed, servers: int, load: float) -> float:
    """Seconds in which all requests come, so that the servers are busy for this share of them without any cache."""
    work_s = sum(
        one.traced.input_tokens * speed.token_s
        + one.traced.output_tokens * speed.step_s / PROBE_ROWS
        for one in prompts
    )
    return work_s / (servers * load)


def outcome_of(
    policy: str, load: float, requests: Sequence[Request], replicas: Sequence[Replica], slo: Slo
) -> Outcome:
    first = [one.ledger.first_token - one.ledger.arrived for one in requests]
    each = [
        (one.ledger.finished - one.ledger.first_token) / max(len(one.outputs) - 1, 1)
        for one in requests
    ]
    good = sum(a <= slo.ttft_s and b <= slo.tpot_s for a, b in zip(first, each, strict=True))
    seconds = max(one.ledger.finished for one in requests) - requests[0].ledger.arrived
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


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


MOST_TURNS, MOST_BLOCKS_OF_TURN, LONGEST_ANSWER = 8, 6, 300  # of made-up conversations


def conversation_blocks(context: int, page_size: int) -> int:
    """Tokens of a block with which the longest made-up conversation fits; at least a page."""
    blocks = 2 + MOST_TURNS * MOST_BLOCKS_OF_TURN
    tokens = BLOCK_TOKENS
    while tokens > page_size and blocks * tokens + LONGEST_ANSWER > context:
        tokens //= 2
    return tokens


def conversations(requests: int, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> list[Traced]:
    """Made-up conversations: a system prompt that many share, turns that grow, people who take their time."""
    draw = random.Random(seed)
    made: list[Traced] = []
    fresh = itertools.count(1000)
    while len(made) < requests:
        at_s = draw.uniform(0, requests)
        blocks = [draw.randrange(8), 100 + draw.randrange(16)]
        for _ in range(draw.randint(1, MOST_TURNS)):
            blocks = [*blocks, *(next(fresh) for _ in range(draw.randint(1, MOST_BLOCKS_OF_TURN)))]
            answer = draw.randint(20, LONGEST_ANSWER)
            made.append(Traced(at_s, block_tokens * len(blocks), answer, tuple(blocks)))
            at_s += draw.expovariate(1 / 30)
    return sorted(made, key=lambda one: one.at_s)[:requests]
