"""When do servers of their own for prefill and decode pay? The same requests through three arrangements of servers.

    aggregated    every server does both; requests take turns
    separated     decode servers ask prefill servers for every prompt (`--prefill-when always`)
    conditional   ... for those where `pays_elsewhere` says so, which is what decode servers run

    arrival --> decode --ask, half the way--> prefill --reply, the other half--> pages over the link --> decode goes on

Schedulers, prefix caches, pages that are held for others and the policy are the servers' own. Only devices and network
are replaced: a step takes what the planner's cost model says, and pages come to a decode server one prompt at a time.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from cairn.fleet.simulate import Slo
from cairn.fleet.simulate_replica import StepSeconds, speed_of
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Step
from cairn.serve.separation.handover_blocks import HandoverBlocks
from cairn.serve.separation.remote_prefill_policy import Pending, RemoteCosts, pays_elsewhere

Arrangement = Literal["aggregated", "separated", "conditional"]
ARRANGEMENTS: tuple[Arrangement, ...] = ("aggregated", "separated", "conditional")
SHORTEST = 128  # tokens of a prompt that is asked for: --prefill-min-tokens
PREFIXES = 8  # that requests share


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the grid."""

    input_tokens: int
    output_tokens: int
    hits: float  # share of a prompt that others have had before
    load: float  # of what the servers could compute if nothing were cached


class Machines(msgspec.Struct, frozen=True, kw_only=True):
    """Servers and the network between them."""

    limits: Limits
    step_seconds: StepSeconds
    token_bytes: float  # of the cache
    prefill: int = 1
    decode: int = 1
    link_bytes_per_s: float = 50e9
    way_s: float = 0.002  # to another server and back, without waiting


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    arrangement: Arrangement
    point: Point
    goodput: float  # requests that held the SLO, of those that came in a second
    good_share: float
    ttft_p50_s: float
    ttft_p99_s: float
    tpot_p99_s: float
    remote_share: float  # of prompts that were computed elsewhere


class Server:
    """Simulated engine: its scheduler, and the end of its current step."""

    def __init__(self, machines: Machines) -> None:
        limits = machines.limits
        self.scheduler = Scheduler(limits)
        self.blocks = HandoverBlocks(limits.pages, limits.page_size, groups=limits.groups)
        self.scheduler.manage(self.blocks)
        self.costs = RemoteCosts()
        self.asked: dict[int, int] = {}  # prompts that were asked for, and their tokens
        self.line: deque[Request] = deque()  # prompts that are computed and have no pages here yet
        self.link_free_s = 0.0
        self.flying: tuple[float, Step] | None = None
        self._seconds = machines.step_seconds

    def start(self, now: float) -> None:
        if self.flying is not None or not self.scheduler.has_work:
            return
        step = self.scheduler.schedule()
        for request in step.admitted:
            request.ledger.scheduled = request.ledger.scheduled or now
        if step.chunks:
            self.flying = now + self._seconds(step), step
        else:
            self.scheduler.update(step, [])

    @property
    def ends_s(self) -> float:
        return self.flying[0] if self.flying is not None else float("inf")


class Separation:
    """Simulation of one arrangement under one load, from the first arrival to the last token."""

    def __init__(self, machines: Machines, arrangement: Arrangement) -> None:
        self.machines, self.arrangement = machines, arrangement
        together = arrangement == "aggregated"
        count = machines.decode + machines.prefill if together else machines.decode
        self.decode = [Server(machines) for _ in range(count)]
        self.prefill = [] if together else [Server(machines) for _ in range(machines.prefill)]
        self.now, self.remote = 0.0, 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        # By id: a request whose prompt is computed elsewhere, its decode server, and when it asked.
        self._own: dict[int, tuple[Request, Server, float]] = {}
        self._behind: dict[int, int] = {}  # by id: tokens that were asked for before it
        self._turn = itertools.count()

    def run(self, arrivals: Sequence[tuple[float, Request]]) -> None:
        for at_s, request in arrivals:
            self._at(at_s, lambda request=request: self._arrive(request))
        servers = [*self.decode, *self.prefill]
        while True:
            for server in servers:
                server.start(self.now)
            first = min(servers, key=lambda server: server.ends_s)
            event_s = self._events[0][0] if self._events else float("inf")
            self.now = min(event_s, first.ends_s)
            if self.now == float("inf"):
                return
            if event_s <= first.ends_s:
                heapq.heappop(self._events)[2]()
            else:
                self._land(first)

    def _at(self, at_s: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), do))

    def _arrive(self, request: Request) -> None:
        turn = next(self._turn)
        server = self.decode[turn % len(self.decode)]
        request.ledger.arrived = self.now
        if not self._is_remote(server, request):
            server.scheduler.add(request)
            return
        self.remote += 1
        asked = Request(request.id, request.prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        self._own[int(request.id)] = request, server, self.now
        self._behind[int(request.id)] = round(self._pending(server).tokens)
        server.asked[int(request.id)] = len(request.prompt)
        prefill = self.prefill[turn % len(self.prefill)]
        self._at(self.now + self.machines.way_s / 2, lambda: self._ask(prefill, asked))

    def _is_remote(self, server: Server, request: Request) -> bool:
        if not self.prefill or len(request.prompt) < SHORTEST:
            return False
        if self.arrangement == "separated":
            return True
        return pays_elsewhere(
            server.scheduler, request, server.costs, self._bytes_of, self.now, self._pending(server)
        )

    def _pending(self, server: Server) -> Pending:
        """Pending remote prefill of a server, from its own requests."""
        share = 1 / len(self.prefill)
        return Pending(len(server.asked) * share, sum(server.asked.values()) * share)

    def _bytes_of(self, tokens: int, start: int) -> int:
        return int((tokens - start) * self.machines.token_bytes)

    def _ask(self, prefill: Server, asked: Request) -> None:
        prefill.blocks.keep(asked.id)
        prefill.scheduler.add(asked)

    def _land(self, server: Server) -> None:
        assert server.flying is not None
        step, server.flying = server.flying[1], None
        for advance in server.scheduler.update(step, [0] * len(step.sampling)):
            request = advance.request
            if not request.ledger.first_token:
                request.ledger.first_token = self.now
            if advance.finished:
                request.ledger.finished = self.now
                if server in self.prefill:
                    done_s = self.now + self.machines.way_s / 2
                    self._at(done_s, lambda one=request: self._replied(server, one))
        self._begin_transfers(server)

    def _replied(self, prefill: Server, asked: Request) -> None:
        """The first token is there; the pages follow."""
        request, server, began_s = self._own[int(asked.id)]
        compute_s = asked.ledger.first_token - asked.ledger.scheduled
        computed = len(asked.prompt) - asked.cached
        del server.asked[int(asked.id)]
        behind = self._behind.pop(int(asked.id))
        server.costs.note_reply(computed, compute_s, self.now - began_s, self.now, behind)
        request.ledger.first_token = self.now
        request.outputs.append(0)
        request.total += 1
        request.cached = asked.cached
        self._own[int(asked.id)] = request, prefill, began_s
        server.line.append(request)
        self._begin_transfers(server)

    def _begin_transfers(self, server: Server) -> None:
        while server.line:
            request = server.line[0]
            running = [one.end for one in server.scheduler.requests.values()]
            stand_in = server.blocks.reserve(request, [*running, *(one.end for one in server.line)])
            if stand_in is None:
                return
            server.line.popleft()
            moved = self._bytes_of(len(request.prompt), stand_in.computed)
            seconds = moved / self.machines.link_bytes_per_s
            server.link_free_s = max(server.link_free_s, self.now) + seconds
            server.costs.note_pages(moved, seconds)
            self._at(server.link_free_s, lambda one=request: self._arrived(server, one))

    def _arrived(self, server: Server, request: Request) -> None:
        _, prefill, _ = self._own.pop(int(request.id))
        prefill.blocks.let_go(request.id)
        server.blocks.arrived(request.id)
        server.scheduler.add(request)


def requests_of(
    point: Point, count: int, machines: Machines, seed: int = 0
) -> list[tuple[float, Request]]:
    """Arrivals without memory at the rate of this load; the beginnings of prompts are shared by eighths of them."""
    speed, draw = speed_of(machines.step_seconds), random.Random(seed)
    work_s = point.input_tokens * speed.token_s + point.output_tokens * speed.row_s
    rate = point.load * (machines.prefill + machines.decode) / work_s
    params = SamplingParams(max_tokens=point.output_tokens, ignore_eos=True)
    shared, at_s, made = round(point.hits * point.input_tokens), 0.0, []
    for number in range(count):
        own = [PREFIXES + number + 1] * (point.input_tokens - shared)
        made.append((at_s, Request(number, [1 + draw.randrange(PREFIXES)] * shared + own, params)))
        at_s += draw.expovariate(rate)
    return made


def simulate_separation(
    arrangement: Arrangement, point: Point, count: int, machines: Machines, slo: Slo
) -> Outcome:
    run, arrivals = Separation(machines, arrangement), requests_of(point, count, machines)
    run.run(arrivals)
    ledgers = [request.ledger for _, request in arrivals]
    first = [one.first_token - one.arrived for one in ledgers]
    between = max(point.output_tokens - 1, 1)
    each = [(one.finished - one.first_token) / between for one in ledgers]
    good = sum(a <= slo.ttft_s and b <= slo.tpot_s for a, b in zip(first, each, strict=True))
    first.sort()
    return Outcome(
        arrangement=arrangement,
        point=point,
        goodput=good / max(arrivals[-1][0], 1e-9),
        good_share=good / count,
        ttft_p50_s=first[count // 2],
        ttft_p99_s=first[int(0.99 * (count - 1))],
        tpot_p99_s=sorted(each)[int(0.99 * (count - 1))],
        remote_share=run.remote / count,
    )
