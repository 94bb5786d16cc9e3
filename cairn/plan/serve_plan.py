"""How should this model be served, how fast will it be, and what does it cost? By simulating the real scheduler.

    for each tp that divides the model and fits          memory by part
      load at the asked rate, and at rates around it     the curve of throughput and latency
      the most a replica takes within the SLO            how many replicas the rate needs
    fewest GPUs that hold the SLO win; the others say why they lost

Requests are drawn, the device is a cost function (`serve_cost`), everything between is the engine's own code. Pure.
"""

import math
from collections.abc import Callable

import msgspec

from cairn.core.errors import ConfigError
from cairn.core.units import format_bytes
from cairn.plan.device import Device
from cairn.plan.serve_cost import Served
from cairn.plan.serve_load import STEP_MS, Load, Room, Workload, room, run

REQUESTS = 200  # of one simulation
SHARES = (0.3, 0.6, 0.8, 0.95, 1.1)  # of what a replica can take, for the curve
WATTS_IDLE = 0.25  # of the watts of a busy GPU


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    rate: float  # requests a second
    input_tokens: int
    output_tokens: int
    slo_ttft: float  # seconds, p99
    slo_tpot: float
    weight_bytes: float = 2.0
    seed: int = 0


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way to serve: replicas of tp GPUs each."""

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
    asked: Asked


def plan(
    served: Served, asked: Asked, most_gpus: int, done: Callable[[str], None] = lambda what: None
) -> ServePlan:
    """`done` hears of every size of tp that has been simulated."""
    _check(asked, most_gpus)
    options = []
    for tp in sizes(served, most_gpus):
        options.append(_option(msgspec.structs.replace(served, tp=tp), asked, most_gpus))
        done(f"tp {tp}")
    holding = [option for option in options if option.holds]
    best = min(holding, key=lambda option: (option.gpus, option.tp), default=None)
    told = [
        option if option is best else msgspec.structs.replace(option, why=_why(option, best, asked))
        for option in options
    ]
    curve = _curve(msgspec.structs.replace(served, tp=best.tp), asked, best.most) if best else []
    return ServePlan(best=best, options=told, curve=curve, device=served.device, asked=asked)


def _check(asked: Asked, gpus: int) -> None:
    for name in ("rate", "input_tokens", "output_tokens", "slo_ttft", "slo_tpot"):
        if not 0 < getattr(asked, name) < math.inf:
            raise ConfigError(f"{name.replace('_', ' ')} is {getattr(asked, name)}", hint="above 0")
    if gpus < 1:
        raise ConfigError(f"{gpus} GPUs", hint="at least 1")


def sizes(served: Served, gpus: int) -> list[int]:
    """Powers of two that cut the heads evenly and stay within a node."""
    spec = served.spec
    most = min(gpus, served.device.gpus_per_node)
    return [
        tp for tp in (1, 2, 4, 8) if tp <= most and spec.heads % tp == 0 and spec.kv_heads % tp == 0
    ]


def _option(served: Served, asked: Asked, most_gpus: int) -> Option:
    space, device = room(served), served.device
    context = asked.input_tokens + asked.output_tokens
    if space.cache_tokens < context:
        return Option(tp=served.tp, replicas=0, gpus=0, room=space, load=None, most=0.0, holds=False,
                      usd_per_hour=0.0, usd_per_million=0.0, joules_per_token=0.0)  # fmt: skip
    most = _most(served, asked)
    replicas = max(1, math.ceil(asked.rate / most - 1e-9))
    load = run(served, _workload(asked, asked.rate / replicas), step_ms=STEP_MS)
    while not _holds(load, asked) and replicas * served.tp < most_gpus and load.busy > 0.3:
        replicas += max(1, replicas // 4)
        load = run(served, _workload(asked, asked.rate / replicas), step_ms=STEP_MS)
    gpus = replicas * served.tp
    tokens = asked.rate * asked.output_tokens
    watts = gpus * device.watts * (WATTS_IDLE + (1 - WATTS_IDLE) * load.busy)
    cost = gpus * device.usd_per_hour
    return Option(
        tp=served.tp, replicas=replicas, gpus=gpus, room=space, load=load, most=most,
        holds=_holds(load, asked) and gpus <= most_gpus, usd_per_hour=cost,
        usd_per_million=cost / (tokens * 3600) * 1e6, joules_per_token=watts / tokens,
    )  # fmt: skip


def _most(served: Served, asked: Asked) -> float:
    """Requests a second that one replica finishes when there are always more."""
    load = run(served, _workload(asked, math.inf), step_ms=STEP_MS)
    return load.requests / load.seconds


def _workload(asked: Asked, rate: float) -> Workload:
    """Lengths around the asked ones, by a quarter to both sides."""
    least, most = 0.75, 1.25
    return Workload(
        requests=REQUESTS,
        rate=rate,
        seed=asked.seed,
        input_least=max(1, int(asked.input_tokens * least)),
        input_most=max(1, int(asked.input_tokens * most)),
        output_least=max(1, int(asked.output_tokens * least)),
        output_most=max(1, int(asked.output_tokens * most)),
    )


def _holds(load: Load, asked: Asked) -> bool:
    return load.ttft_p99 <= asked.slo_ttft and load.tpot_p99 <= asked.slo_tpot


def _curve(served: Served, asked: Asked, most: float) -> list[Load]:
    return [run(served, _workload(asked, share * most), step_ms=STEP_MS) for share in SHARES]


def _why(option: Option, best: Option | None, asked: Asked) -> str:
    if option.load is None:
        weights, total = option.room.weights, option.room.total
        return (
            f"does not fit: weights {format_bytes(weights)} of {format_bytes(total)}, "
            f"{option.room.cache_tokens:,} tokens of cache are left"
        )
    if not option.holds:
        return (
            f"misses the SLO: p99 TTFT {1e3 * option.load.ttft_p99:,.0f} of {1e3 * asked.slo_ttft:,.0f} ms, "
            f"TPOT {1e3 * option.load.tpot_p99:.1f} of {1e3 * asked.slo_tpot:.1f} ms with {option.gpus} GPUs"
        )
    if best is None or option.gpus > best.gpus:
        return f"{option.gpus} GPUs where {best.gpus if best else 0} are enough"
    return f"the same {option.gpus} GPUs, more of them in each collective"
