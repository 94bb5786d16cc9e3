"""Simulated time of a collective on a cluster, chunk by chunk and rail by rail.

    every GPU of a node        every rail                     every GPU of a node
    reduce-scatter (NVLink) -> tree | ring | pat (network) -> all-gather (NVLink)

Chunks follow each other through the three stages. On the network each edge of the schedule is a
connection of `paths` flows; where they meet, links are shared max-min, and the slowest link of an edge
sets the service time of its chunks. Rails that are alike are simulated once.

What it leaves out: queues (`lossless` has them), the order in which a GPU's kernels run, and traffic of
others. Rates are those of full pipelines: an edge has its share also while others still wait.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from cairn.comm.schedule.ops import COLLECTIVES, Collective
from cairn.comm.simulate import faults as wrong
from cairn.comm.simulate.pipeline import Tick, through
from cairn.comm.simulate.rail import Algorithm, Far, RailNetwork, over_rail
from cairn.comm.simulate.topology import FabricTopology, delay_us
from cairn.core.errors import ConfigError, did_you_mean

CAN: dict[Collective, tuple[Algorithm, ...]] = {
    "all_reduce": ("tree", "ring", "pat"),
    "all_gather": ("pat", "ring"),
    "reduce_scatter": ("pat", "ring"),
    "broadcast": ("tree",),
    "reduce": ("tree",),
    "all_to_all": ("pairwise",),
}
MOST_RING_NODES = 1 << 15  # a ring of n nodes is 2n steps of n numbers
RAILS = 2  # of those that differ only by how their flows are hashed
SMALLEST_CHUNK = 4096
MOST_CHUNKS = 4096


class CollectiveResult(msgspec.Struct, frozen=True, kw_only=True):
    collective: Collective
    algorithm: Algorithm
    bytes: int
    us: float
    near_us: float  # NVLink alone
    far_us: float  # the network alone
    algbw_gb_per_s: float
    busbw_gb_per_s: float
    steps: int  # waits for the network, one after another
    chunks: int
    chunk_bytes: float
    flows: int  # that were routed
    largest_sharing: int  # flows on the most crowded link between switches
    ideal_us: float  # the same bytes at the full rate of NVLink and NIC, without any wait
    rails: int  # that were simulated; the slowest counts
    faults: list[str]


class RailOutcome(NamedTuple):
    result: CollectiveResult
    finish: np.ndarray  # [planes, nodes]: when each has everything, in us
    chunk_times: np.ndarray  # of the last node to finish, on its rail


def simulate(
    top: FabricTopology,
    collective: str,
    size: int,
    *,
    algorithm: str = "auto",
    faults: wrong.Faults = wrong.HEALTHY,
    chunks: int = 128,
    rails: int = RAILS,
    tick: Tick = lambda what: None,
) -> RailOutcome:
    """`size` is of the whole vector, as nccl-tests count it. Rails with faults are always simulated."""
    op = _checked(top, collective, size, algorithm, chunks)
    wrong.check(faults, top)
    if rails < 1:
        raise ConfigError(f"{rails} rails to simulate", hint="one or more")
    chunks = max(1, min(chunks, int(size / top.domain / 2 / SMALLEST_CHUNK)))
    if top.nodes == 1:
        return _one_domain(top, op, size, chunks, faults)
    if algorithm == "auto":
        chosen = _fastest(top, op, size, chunks, tick)
    else:
        chosen: Algorithm = algorithm  # pyrefly: ignore
    planes = _distinct(top, faults, rails)
    return _over_network(top, op, chosen, size, chunks, faults, tick, planes)


def _fastest(top: FabricTopology, op: Collective, size: int, chunks: int, tick: Tick) -> Algorithm:
    """The fastest algorithm on one healthy rail. Algorithms whose lower bound exceeds the best time are skipped."""
    best, least = CAN[op][0], math.inf
    for name in CAN[op]:
        if name == "ring" and top.nodes > MOST_RING_NODES:
            continue
        if _floor(top, op, name, size) >= least:
            continue
        result = _over_network(top, op, name, size, chunks, wrong.HEALTHY, tick, [0]).result
        if result.us < least:
            best, least = name, result.us
    return best


def _floor(top: FabricTopology, op: Collective, name: Algorithm, size: int) -> float:
    """Lower bound of an algorithm's time: a ring waits for every node, PAT works on whole vectors."""
    if name == "ring":
        steps = (top.nodes - 1) * (2 if op == "all_reduce" else 1)
        return steps * float(delay_us(top, np.zeros(1), np.zeros(1))[0])
    wire = far_traffic(op, top.nodes) * size / top.domain / (1e3 * top.nic_gb_per_s)
    return wire + near_us(top, op, size) if name == "pat" else 0.0


def bus_factor(collective: Collective, ranks: int) -> float:
    """busbw / algbw, as nccl-tests define it."""
    if collective == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if collective in ("broadcast", "reduce") else (ranks - 1) / ranks


def near_us(top: FabricTopology, op: Collective, size: int) -> float:
    """Bytes that each GPU moves inside its node, at the rate of NVLink."""
    share = (top.domain - 1) / top.domain
    times = 2 if op in ("all_reduce", "broadcast", "reduce") else 1
    return times * share * size / (1e3 * top.nvlink_gb_per_s)


def far_traffic(op: Collective, nodes: int) -> float:
    """Shares of the rail's vector that a NIC must send at least."""
    if op == "all_reduce":
        return 2 * (nodes - 1) / nodes
    return 1.0 if op in ("broadcast", "reduce") else (nodes - 1) / nodes


def _over_network(
    top: FabricTopology,
    op: Collective,
    name: Algorithm,
    size: int,
    chunks: int,
    faults: wrong.Faults,
    tick: Tick,
    planes: list[int],
) -> RailOutcome:
    rail_bytes, near = size / top.domain, near_us(top, op, size)
    each = near / chunks  # where both stages use NVLink, each has half of it
    first = np.tile(wrong.lateness(faults, top)[:, None], (1, chunks))
    if op not in ("all_gather", "all_to_all"):
        first = first + through(np.zeros(chunks), each)
    fars, names = [], wrong.describe(faults, top)
    for plane in planes:
        network = RailNetwork(top, faults, plane)
        fars.append(over_rail(network, op, name, rail_bytes, first, tick))
        tick(f"{name} on rail {plane}")
    last = op != "reduce_scatter"
    finish = np.stack(
        [through(far.finish, each)[:, -1] if last else far.finish[:, -1] for far in fars]
    )
    if op == "all_to_all":
        finish = np.maximum(finish, near)
    slowest = int(finish.max(axis=1).argmax())
    result = _result(top, op, name, size, chunks, float(finish.max()), near, fars, names)
    node = int(finish[slowest].argmax())
    return RailOutcome(result, finish, fars[slowest].finish[node])


def _one_domain(
    top: FabricTopology, op: Collective, size: int, chunks: int, faults: wrong.Faults
) -> RailOutcome:
    """NVLink alone: every GPU tells every other through the switch."""
    stages = 2 if op == "all_reduce" else 1
    near, late = near_us(top, op, size), wrong.lateness(faults, top).max()
    finish = through(np.full(chunks, late), near / chunks) + top.nvlink_us * stages
    result = _result(
        top, op, "nvlink", size, chunks, float(finish[-1]), near, [], wrong.describe(faults, top)
    )
    return RailOutcome(result, finish[-1:][None], finish)


def _result(
    top: FabricTopology,
    op: Collective,
    name: Algorithm,
    size: int,
    chunks: int,
    us: float,
    near: float,
    fars: list[Far],
    names: list[str],
) -> CollectiveResult:
    rail = size / top.domain
    wire = 0.0 if not fars else far_traffic(op, top.nodes) * rail / (1e3 * top.nic_gb_per_s)
    algbw = size / (1e3 * us)
    return CollectiveResult(
        collective=op,
        algorithm=name,
        bytes=size,
        us=us,
        near_us=near,
        far_us=float(max((far.alone for far in fars), default=0.0)),
        algbw_gb_per_s=algbw,
        busbw_gb_per_s=algbw * bus_factor(op, top.gpus),
        steps=max((far.steps for far in fars), default=2 if op == "all_reduce" else 1),
        chunks=chunks,
        chunk_bytes=size / top.domain / chunks,
        flows=sum(far.flows for far in fars),
        largest_sharing=max((far.sharing for far in fars), default=0),
        ideal_us=max(near, wire),
        rails=len(fars),
        faults=names,
    )


def _distinct(top: FabricTopology, faults: wrong.Faults, rails: int) -> list[int]:
    """The rails to simulate: those with faults, and some of the others, which only hash differently."""
    if top.planes == 1:
        return [0]
    hashed = top.tiers >= 2 and top.balance == "ecmp" and top.ends > top.below
    chosen = set(range(min(rails, top.planes) if hashed or faults.dead_links else 1))
    return sorted(chosen | wrong.touched(faults, top))


def _checked(
    top: FabricTopology, collective: str, size: int, algorithm: str, chunks: int
) -> Collective:
    if collective not in COLLECTIVES:
        there = f"one of {', '.join(COLLECTIVES)}"
        raise ConfigError(
            f"unknown collective '{collective}'", hint=did_you_mean(collective, COLLECTIVES, there)
        )
    op: Collective = collective  # pyrefly: ignore
    if size < top.gpus:
        raise ConfigError(
            f"{size} bytes for {top.gpus} GPUs: some would have nothing to send",
            hint="use at least one byte for each GPU",
        )
    if not 1 <= chunks <= MOST_CHUNKS:
        raise ConfigError(f"{chunks} chunks", hint=f"from 1 to {MOST_CHUNKS}")
    algorithms = ("auto", *CAN[op])
    if algorithm not in algorithms:
        raise ConfigError(
            f"{op} between nodes has no '{algorithm}' here",
            hint=did_you_mean(algorithm, algorithms, f"one of {', '.join(algorithms)}"),
        )
    if algorithm == "ring" and top.nodes > MOST_RING_NODES:
        raise ConfigError(
            f"a ring of {top.nodes:,} nodes takes {2 * top.nodes:,} steps",
            hint=f"up to {MOST_RING_NODES:,} nodes are simulated; use tree",
        )
    return op
