"""Three constants of a fabric: what a measured sweep says about it, and what they predict.

One NVLink domain      launch, cost of a chunk, scale of bandwidth; two stages (reduce, spread) with
                       chunks behind each other (LL has a flag beside each word instead), over the
                       pairs of algorithm and protocol NCCL has
Several domains        launch, delay of a message between domains, GB/s of the network for each GPU;
                       simulated by `collective`, NVLink at the rate NCCL's tables give it

The same constants serve every number of domains of a fabric. Knows no published figure.
"""

import math
from collections.abc import Callable

import msgspec
import numpy as np

from cairn.comm.nccl_model import PROTOCOLS, Algorithm, NcclCluster, bandwidth, latency_us
from cairn.comm.simulate.collective import simulate
from cairn.comm.simulate.topology import topology

CHUNKS = np.array([1 << power for power in range(11)])
CUTS = 32  # chunks between domains
TRIED: tuple[Algorithm, ...] = ("ring", "tree", "nvls")


class Domain(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one NVLink domain."""

    launch_us: float
    chunk_us: float
    scale: float


class Domains(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of several."""

    launch_us: float
    message_us: float
    nic_gb_per_s: float


def one_domain_us(cluster: NcclCluster, size: int, constants: Domain) -> tuple[float, str]:
    """The fastest pair, and its time."""
    best, name = math.inf, ""
    for algorithm in TRIED:
        for protocol in PROTOCOLS:
            rate = bandwidth(cluster, "all_reduce", algorithm, protocol) * constants.scale
            if rate <= 0:
                continue
            wire = size / (1e3 * rate)
            us = latency_us(cluster, "all_reduce", algorithm, protocol)
            us += wire if protocol == "ll" else two_stages_us(wire, constants.chunk_us)
            if us < best:
                best, name = us, f"{algorithm}/{protocol}"
    return best + constants.launch_us, name


def two_stages_us(wire_us: float, chunk_us: float) -> float:
    """Chunks through two stages, cut as suits best: K + 1 times what a chunk takes."""
    return float(((CHUNKS + 1) * (chunk_us + wire_us / CHUNKS)).min()) - chunk_us


def domains_us(cluster: NcclCluster, size: int, constants: Domains) -> tuple[float, str]:
    """The simulator: a ring over the domains, NVLink inside."""
    near = bandwidth(_alone(cluster), "all_reduce", "nvls", "simple") or bandwidth(
        _alone(cluster), "all_reduce", "ring", "simple"
    )
    bus = near * 2 * (cluster.gpus - 1) / cluster.gpus
    if cluster.nodes == 1:
        return constants.launch_us + size / (1e3 * near), "nvlink"
    top = topology(
        "rail-1tier",
        cluster.ranks,
        domain=cluster.gpus,
        nvlink_gb_per_s=bus,
        nic_gb_per_s=constants.nic_gb_per_s,
        host_us=constants.message_us,
    )
    found = simulate(top, "all_reduce", size, algorithm="ring", chunks=CUTS).result
    return constants.launch_us + found.us, "ring between domains"


def _alone(cluster: NcclCluster) -> NcclCluster:
    return msgspec.structs.replace(cluster, nodes=1)


def descend(
    loss: Callable[[np.ndarray], float], begin: list[float], rounds: int = 16
) -> np.ndarray:
    """Positive numbers that make the loss small: one at a time, by factors that shrink."""
    best = np.array(begin, dtype=float)
    least, factor = loss(best), 2.0
    for _ in range(rounds):
        for place in range(len(best)):
            for times in (factor, 1 / factor):
                tried = best.copy()
                tried[place] *= times
                now = loss(tried)
                if now < least:
                    best, least = tried, now
                    break
        factor = factor**0.75
    return best


def fit_domain(cluster: NcclCluster, points: list[tuple[int, float]]) -> Domain:
    def loss(x: np.ndarray) -> float:
        made = Domain(launch_us=x[0], chunk_us=x[1], scale=x[2])
        return _spread([one_domain_us(cluster, size, made)[0] / us for size, us in points])

    launch, chunk, scale = descend(loss, [20.0, 2.0, 1.0])
    return Domain(launch_us=float(launch), chunk_us=float(chunk), scale=float(scale))


def fit_domains(points: list[tuple[NcclCluster, int, float]]) -> Domains:
    def loss(x: np.ndarray) -> float:
        made = Domains(launch_us=x[0], message_us=x[1], nic_gb_per_s=x[2])
        return _spread([domains_us(cluster, size, made)[0] / us for cluster, size, us in points])

    smallest = min(us for _, _, us in points)
    nic = points[0][0].nic_gb_per_s
    launch, message, rate = descend(loss, [smallest / 3, 20.0, nic / 2])
    return Domains(launch_us=float(launch), message_us=float(message), nic_gb_per_s=float(rate))


def _spread(ratios: list[float]) -> float:
    return float(np.mean(np.abs(np.log(ratios))))
