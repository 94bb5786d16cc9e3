"""Expected productive share of a job of N GPUs with failures, checkpoints and restarts, in closed form.

    MTTF     1 / (nodes * failures of a node a day)                       the larger the job, the sooner it stops
    ETTR     productive time / wall time                                  "effective training time ratio"
    goodput  ETTR * GPUs                                                  what the cluster is worth

    |--- dt ---|w|--- dt ---|w|--- dt --x        w writes a checkpoint, x is a failure
                               lost work | detect | restart | ...          u0 = detect + restart

Exact for failures without memory (exponential) that may also strike a restart or a checkpoint: an interval of dt + w
takes M e^(u0/M) (e^((dt+w)/M) - 1) on average, of which dt is productive. Pure; seconds throughout. Knows no cluster
software: what a job does after a failure is `core/restart_policy`.
"""

import math
from typing import Literal

import msgspec

from cairn.core.errors import ConfigError

DAY = 86_400.0
GPUS_PER_NODE = 8

# Failures per node and day. RSC: Kokolis and others, HPCA 2025 (A100). Llama 3: 419 unexpected interruptions of
# 2,048 nodes in 54 days (H100).
RATES = {"rsc-1": 6.50e-3, "rsc-2": 2.34e-3, "llama-3": 419 / (2048 * 54)}


class RecoveryScheme(msgspec.Struct, frozen=True, kw_only=True):
    """Recovery scheme of a job and its costs."""

    name: str
    about: str
    write: float  # seconds of training lost to one checkpoint
    detect: float  # from the failure until it is detected
    restart: float  # from then until the next step: new node, processes, load

    @property
    def outage(self) -> float:
        return self.detect + self.restart


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        RecoveryScheme(
            name="sync", about="stop and write to shared storage", write=60, detect=300, restart=300
        ),
        RecoveryScheme(
            name="async", about="copy to host memory, write behind", write=5, detect=60, restart=240
        ),
        RecoveryScheme(
            name="memory",
            about="copy to a peer's memory, spare nodes",
            write=1,
            detect=10,
            restart=50,
        ),
        RecoveryScheme(
            name="per-step",
            about="redo the step without the lost replica",
            write=0.2,
            detect=2,
            restart=8,
        ),
    )
}

Interval = Literal["young", "daly", "best"]


class Outlook(msgspec.Struct, frozen=True, kw_only=True):
    """Expected reliability of a job."""

    gpus: int
    scheme: str
    mttf: float  # seconds
    interval: float  # between checkpoints, seconds of work
    ettr: float
    goodput_gpus: float
    failures_per_day: float
    lost: dict[str, float]  # share of wall time by cause; with ettr it adds up to 1
    linear_ettr: float  # Meta's first-order form, for comparison


def mttf(gpus: int, per_node_day: float, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Seconds between failures of a job, if every node fails alike and any failure stops the job."""
    return DAY / (math.ceil(gpus / gpus_per_node) * per_node_day)


def young(write: float, mean: float) -> float:
    return math.sqrt(2 * write * mean)


def daly(write: float, mean: float) -> float:
    """Daly's higher order estimate; beyond w = 2M a checkpoint costs more than it saves."""
    if write >= 2 * mean:
        return mean
    ratio = write / (2 * mean)
    return math.sqrt(2 * write * mean) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write


def best_interval(write: float, mean: float) -> float:
    """The dt that makes the exact ETTR largest: 1 - e^-((dt+w)/M) = dt/M, solved by halving."""
    if write == 0:
        return 0.0
    low, high = 0.0, mean + write
    for _ in range(80):
        middle = (low + high) / 2
        if -math.expm1(-(middle + write) / mean) > middle / mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def ettr(interval: float, write: float, outage: float, mean: float) -> float:
    """Exact: mean productive share of the time, where failures also strike checkpoints and restarts."""
    if interval == 0:  # the limit: continuous checkpoints that cost nothing
        return math.exp(-outage / mean) if write == 0 else 0.0
    exponent = (interval + write) / mean
    if exponent > 700 or outage / mean > 700:
        return 0.0
    return interval / (math.exp(outage / mean) * mean * math.expm1(exponent))


def linear_ettr(interval: float, write: float, outage: float, mean: float) -> float:
    """Meta's form, right while failures are rare; it falls below zero where they are not."""
    if interval == 0:
        return 0.0
    return (1 - (outage + interval / 2) / mean) / (1 + write / interval)


def shares(interval: float, write: float, scheme: RecoveryScheme, mean: float) -> dict[str, float]:
    """Breakdown of the lost time: writing, detecting, restarting, and repeated work.

    Failures come without memory, also during an outage: from one to the next the first `detect` seconds, as far as
    they last, go into finding out, the `restart` seconds after them into coming back.
    """
    productive = ettr(interval, write, scheme.outage, mean)
    knows = math.exp(-scheme.detect / mean)
    works = math.exp(-scheme.outage / mean)
    written = productive * write / interval if interval else 0.0
    return {
        "checkpoint": written,
        "detect": 1 - knows,
        "restart": knows - works,
        "lost work": max(0.0, works - productive - written),
    }


def outlook(
    gpus: int,
    scheme: RecoveryScheme,
    per_node_day: float,
    *,
    interval: float | None = None,
    gpus_per_node: int = GPUS_PER_NODE,
) -> Outlook:
    """Expected reliability with the given or the best checkpoint interval."""
    check(gpus, scheme, per_node_day, interval)
    mean = mttf(gpus, per_node_day, gpus_per_node)
    every = best_interval(scheme.write, mean) if interval is None else interval
    share = ettr(every, scheme.write, scheme.outage, mean)
    return Outlook(
        gpus=gpus,
        scheme=scheme.name,
        mttf=mean,
        interval=every,
        ettr=share,
        goodput_gpus=share * gpus,
        failures_per_day=DAY / mean,
        lost=shares(every, scheme.write, scheme, mean),
        linear_ettr=linear_ettr(every, scheme.write, scheme.outage, mean),
    )


def check(gpus: int, scheme: RecoveryScheme, per_node_day: float, interval: float | None) -> None:
    if gpus < 1:
        raise ConfigError(f"a job of {gpus} GPUs", hint="at least 1")
    if not 0 < per_node_day < math.inf:
        raise ConfigError(
            f"{per_node_day} failures of a node a day", hint="above 0, such as 0.0065"
        )
    for name in ("write", "detect", "restart"):
        value = getattr(scheme, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} is {value} s", hint="0 or more")
    if interval is not None and not 0 < interval < math.inf:
        raise ConfigError(f"a checkpoint every {interval} s", hint="above 0")


def peer_recovery(nodes: int, replicas: int, lost: int) -> float:
    """Chance that every shard survives in some peer's memory when `lost` nodes go at once (Gemini's groups).

    Groups of `replicas` nodes hold the same; a group that is lost whole is lost for good. Inclusion and exclusion.
    """
    if replicas < 1 or nodes % replicas or not 0 <= lost <= nodes:
        raise ConfigError(
            f"{nodes} nodes in groups of {replicas}, {lost} lost",
            hint="nodes are a multiple of the replicas",
        )
    total = 0
    for groups in range(lost // replicas + 1):
        ways = math.comb(nodes // replicas, groups) * math.comb(
            nodes - groups * replicas, lost - groups * replicas
        )
        total += (-1) ** groups * ways
    return total / math.comb(nodes, lost)
