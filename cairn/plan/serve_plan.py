"""Serving plan of a model: options, speed and cost, by simulating the real scheduler.

    for each tp that divides the model and fits          memory by part
      load at the demanded rate, and at rates around it  the curve of throughput and latency
      the most a replica takes within the SLO            how many replicas the rate needs
    the option with the fewest GPUs that holds the SLO wins; the others say why they lost

Requests are drawn at random or read from a trace. The device is a cost function (`serve_cost`); scheduler, block
manager and prefix cache are the engine's own code. Pure.
"""

import math
from collections.abc import Callable

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.models.cache import cache_groups, most_pages
from cairn.plan.device import Device
from cairn.plan.serve_cost import Served
from cairn.plan.serve_load import STEP_MS, Load, Room, Traced, Workload, room, run
from cairn.serve.engine.sizing import GPU_PAGE

REQUESTS, FEW, MOST_TOKENS = 200, 50, 1 << 20  # of one simulation: fewer where they are long
SHARES = (0.3, 0.6, 0.8, 0.95, 1.1, 1.3)  # of what a replica can take, for the curve
IDLE = 0.3  # busy for less than this share of the time: more replicas would not be faster
WATTS_IDLE = 0.25  # of the watts of a busy GPU


def usual_requests(input_tokens: int, output_tokens: int) -> int:
    """Default number of simulated requests."""
    return min(REQUESTS, max(FEW, MOST_TOKENS // (input_tokens + output_tokens)))


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """The load to be served, and the latencies that it is promised."""

    rate: float  # requests a second
    input_tokens: int  # of a trace, the mean
    output_tokens: int
    slo_ttft: float  # seconds, p99
    slo_tpot: float
    requests: int = REQUESTS  # of one simulation
    trace: tuple[Traced, ...] = ()  # in place of drawn requests
    seed: int = 0

    def longest(self) -> int:
        """Tokens of the longest request, prompt and answer."""
        if self.trace:
            return max(len(one.prompt) + one.output_tokens for one in self.trace)
        lengths = _workload(self, self.rate)
        return lengths.input_most + lengths.output_most


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """A serving option: replicas of tp GPUs each."""

    tp: int
    replicas: int
    gpus: int
    room: Room
    load: Load | None  # of one replica with its share of the rate
    most: float  # requests a second that a replica can take at all
    holds: bool
    usd_per_hour: float
    usd_per_million: float  # output tokens
    joules_per_token: float  # output
    why: str = ""  # it lost


class ServePlan(msgspec.Struct, frozen=True, kw_only=True):
    best: Option | None
    options: list[Option]
    curve: list[Load]  # of the best one, by rate
    device: Device
    demand: Demand


def plan(
    served: Served,
    demand: Demand,
    most_gpus: int,
    advance: Callable[[str], None] = lambda what: None,
) -> ServePlan:
    """`advance` is called with every size of tp that was advance."""
    _check(demand, most_gpus)
    options = []
    for tp in sizes(served, most_gpus):
        options.append(_option(msgspec.structs.replace(served, tp=tp), demand, most_gpus))
        advance(f"tp {tp}")
    holding = [option for option in options if option.holds]
    best = min(holding, key=lambda option: (option.gpus, option.tp), default=None)
    for index, option in enumerate(options):
        if option is not best:
            why = _why(option, best, demand, most_gpus)
            options[index] = msgspec.structs.replace(option, why=why)
    curve = _curve(msgspec.structs.replace(served, tp=best.tp), demand, best.most) if best else []
    return ServePlan(best=best, options=options, curve=curve, device=served.device, demand=demand)


def _check(demand: Demand, gpus: int) -> None:
    for name in ("rate", "input_tokens", "output_tokens", "slo_ttft", "slo_tpot"):
        if not 0 < getattr(demand, name) < math.inf:
            raise ConfigError(
                f"{name.replace('_', ' ')} is {getattr(demand, name)}", hint="above 0"
            )
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", hint="at least 1")


def sizes(served: Served, gpus: int) -> list[int]:
    """Powers of two that cut the heads evenly and stay within a node; layers with a state are not cut."""
    spec = served.spec
    if spec.is_recurrent:
        return [1]
    most = min(gpus, served.device.gpus_per_node)
    return [
        tp for tp in (1, 2, 4, 8) if tp <= most and spec.heads % tp == 0 and spec.kv_heads % tp == 0
    ]


def _option(served: Served, demand: Demand, most_gpus: int) -> Option:
    space, device = room(served), served.device
    longest = min(demand.longest(), served.spec.context)
    if space.pages <= most_pages(cache_groups(served.spec, served.tp), longest, GPU_PAGE):
        return Option(
            tp=served.tp,
            replicas=0,
            gpus=0,
            room=space,
            load=None,
            most=0.0,
            holds=False,
            usd_per_hour=0.0,
            usd_per_million=0.0,
            joules_per_token=0.0,
        )
    most = _most(served, demand)
    replicas, load = _fewest(served, demand, most, most_gpus // served.tp)
    gpus = replicas * served.tp
    tokens = demand.rate * demand.output_tokens
    watts = gpus * device.watts * (WATTS_IDLE + (1 - WATTS_IDLE) * load.busy)
    cost = gpus * device.usd_per_hour
    return Option(
        tp=served.tp,
        replicas=replicas,
        gpus=gpus,
        room=space,
        load=load,
        most=most,
        holds=_holds(load, demand) and gpus <= most_gpus,
        usd_per_hour=cost,
        usd_per_million=cost / (tokens * 3600) * 1e6,
        joules_per_token=watts / tokens,
    )


def _fewest(served: Served, demand: Demand, most: float, limit: int) -> tuple[int, Load]:
    """The fewest replicas, up to `limit`, with which the SLO holds; or the last number tried, and its load."""

    def loaded(replicas: int) -> Load:
        return run(served, _workload(demand, demand.rate, replicas), step_ms=STEP_MS)

    fails, replicas = 0, max(1, math.ceil(demand.rate / most - 1e-9))
    load = loaded(replicas)
    if not _holds(load, demand) and not _holds(_lonely(served, demand), demand):
        return replicas, load  # more of them would not help
    while not _holds(load, demand) and replicas < limit and load.busy > IDLE:
        fails, replicas = replicas, min(replicas + max(1, replicas // 4), limit)
        load = loaded(replicas)
    while _holds(load, demand) and fails and replicas - fails > 1:
        middle = (fails + replicas) // 2
        candidate = loaded(middle)
        if _holds(candidate, demand):
            replicas, load = middle, candidate
        else:
            fails = middle
    return replicas, load


def _lonely(served: Served, demand: Demand) -> Load:
    """The load of one usual request that has a server to itself."""
    size, answer = demand.input_tokens, demand.output_tokens
    one = Workload(
        requests=1, input_least=size, input_most=size, output_least=answer, output_most=answer
    )
    return run(served, one, step_ms=STEP_MS)


def _most(served: Served, demand: Demand) -> float:
    """Requests a second that one replica finishes when there are always more."""
    # With fewer, the last steps, which are nearly empty, would count too much.
    many = msgspec.structs.replace(demand, requests=2 * demand.requests)
    load = run(served, _workload(many, math.inf), step_ms=STEP_MS)
    if load.refused == load.requests:
        raise ConfigError(
            f"none of the {load.requests} requests fits into the {served.spec.context} tokens of the model",
            hint="shorter requests, or a model with a longer context",
        )
    return (load.requests - load.refused) / load.seconds


def _workload(demand: Demand, rate: float, replicas: int = 1) -> Workload:
    """The share of one of n replicas: every n-th request of a trace, or drawn lengths within a quarter of the mean."""
    if demand.trace:
        share = demand.trace[::replicas]
        return Workload(
            requests=len(share),
            rate=rate / replicas,
            trace=share,
            input_least=1,
            input_most=max(len(one.prompt) for one in share),
            output_least=1,
            output_most=max(one.output_tokens for one in share),
        )
    least, most = 0.75, 1.25
    return Workload(
        requests=demand.requests,
        rate=rate / replicas,
        seed=demand.seed,
        input_least=max(1, int(demand.input_tokens * least)),
        input_most=max(1, int(demand.input_tokens * most)),
        output_least=max(1, int(demand.output_tokens * least)),
        output_most=max(1, int(demand.output_tokens * most)),
    )


def _holds(load: Load, demand: Demand) -> bool:
    return load.ttft_p99 <= demand.slo_ttft and load.tpot_p99 <= demand.slo_tpot


def _curve(served: Served, demand: Demand, most: float) -> list[Load]:
    return [run(served, _workload(demand, share * most), step_ms=STEP_MS) for share in SHARES]


def _why(option: Option, best: Option | None, demand: Demand, most_gpus: int) -> str:
    if option.load is None:
        weights, total = option.room.weights, option.room.total
        return (
            f"does not fit: weights {format_bytes(weights)} of {format_bytes(total)}, "
            f"{option.room.cache_tokens:,} tokens of cache are left"
        )
    if option.gpus > most_gpus:
        return (
            f"needs {option.gpus:,} GPUs at {option.most:.1f}/s a replica, more than {most_gpus:,}"
        )
    if not option.holds:
        return (
            f"misses the SLO: p99 TTFT {1e3 * option.load.ttft_p99:,.0f} of {1e3 * demand.slo_ttft:,.0f} ms, "
            f"TPOT {1e3 * option.load.tpot_p99:.1f} of {1e3 * demand.slo_tpot:.1f} ms with {option.gpus} GPUs"
        )
    if best is None or option.gpus > best.gpus:
        enough = best.gpus if best else 0
        return f"{option.gpus} GPUs where {enough} {'is' if enough == 1 else 'are'} enough"
    return f"the same {option.gpus} GPUs, more of them in each collective"
