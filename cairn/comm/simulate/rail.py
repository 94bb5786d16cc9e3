"""Simulation of one rail: trees, a ring, PAT or shifts over its nodes, with pipelined chunks.

    edges of the schedule -> flows -> links they share -> rate of each edge -> when each chunk arrives

All edges of a schedule are taken to be busy at once, as in a full pipeline. Knows bytes and links, and
nothing of what happens inside a node.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from cairn.comm.schedule.ops import Collective
from cairn.comm.schedule.tree import TOP, double_tree_parents
from cairn.comm.simulate import faults as wrong
from cairn.comm.simulate.max_min_fairness import connection_rates
from cairn.comm.simulate.pipeline import Tick, around_ring, by_doubling, down_tree, up_tree
from cairn.comm.simulate.topology import FabricTopology, delay_us, links, route

Algorithm = Literal["tree", "ring", "pat", "pairwise", "nvlink"]
SAMPLED = 6  # shifts of an all-to-all that are routed


class Far(NamedTuple):
    """Result of the simulation of one rail."""

    finish: np.ndarray  # [nodes, chunks]
    steps: int
    flows: int
    sharing: int
    alone: float  # as if everything had been ready at 0


class Edges(NamedTuple):
    us_per_byte: np.ndarray
    delay: np.ndarray
    flows: int
    sharing: int


class RailNetwork:
    """The links of one rail with their faults, and the share of them that each edge gets."""

    def __init__(self, top: FabricTopology, faults: wrong.Faults, plane: int) -> None:
        self.top, self.plane = top, plane
        self.at = links(top)
        applied = wrong.apply(faults, top, self.at, plane)
        self.rate, self.dead = applied.gb_per_s, applied.dead

    def edges(self, source: np.ndarray, target: np.ndarray) -> Edges:
        """Connections between nodes that are all busy at once."""
        top = self.top
        rails = np.arange(top.domain) if top.planes == 1 else np.zeros(1, dtype=np.int64)
        step = top.domain if top.planes == 1 else 1
        ends = [(source[:, None] * step + rails).ravel(), (target[:, None] * step + rails).ravel()]
        away = ends[0] // top.below != ends[1] // top.below
        copies = np.where(away, top.paths, 1)
        number = np.repeat(np.arange(len(away)), copies)
        begin = np.concatenate([[0], np.cumsum(copies)[:-1]])
        path = np.arange(len(number)) - begin[number]
        paths = route(top, ends[0][number], ends[1][number], path, self.plane, self.dead)
        rate = connection_rates(paths, number, len(away), self.rate)
        between = paths[:, 1:5]
        crowd = np.bincount(between[between >= 0], minlength=1).max(initial=0)
        rate = rate.reshape(len(source), -1).min(axis=1)
        return Edges(
            1 / (1e3 * rate), delay_us(top, source * step, target * step), len(number), int(crowd)
        )


def over_rail(
    network: "RailNetwork",
    op: Collective,
    name: Algorithm,
    size: float,
    ready: np.ndarray,
    tick: Tick,
) -> Far:
    match name:
        case "tree":
            return _tree(network, op, size, ready, tick)
        case "ring":
            return _ring(network, op, size, ready, tick)
        case "pat":
            return _pat(network, op, size, ready, tick)
    return _shifts(network, size, ready)


def _tree(network: RailNetwork, op: Collective, size: float, ready: np.ndarray, tick: Tick) -> Far:
    """Both trees at once: an inner node of one is a leaf of the other."""
    nodes, chunks = ready.shape
    trees = _trees(op, nodes)
    child = [np.flatnonzero(parents != TOP) for parents in trees]
    ups = op in ("all_reduce", "reduce")
    downs = op in ("all_reduce", "broadcast")
    pairs = [(c, p[c]) for c, p in zip(child, trees, strict=True) if ups]
    pairs += [(p[c], c) for c, p in zip(child, trees, strict=True) if downs]
    edges = network.edges(*(np.concatenate(side) for side in zip(*pairs, strict=True)))
    piece = size / 2 / chunks
    finish, alone = np.zeros((nodes, chunks)), 0.0
    at, depth = 0, 0
    parts: list[dict[str, tuple[np.ndarray, np.ndarray]]] = [{}, {}]
    for way in [name for name, used in (("up", ups), ("down", downs)) if used]:
        for which in range(2):
            mine = slice(at, at + len(child[which]))
            service, delay = np.zeros(nodes), np.zeros(nodes)
            service[child[which]] = edges.us_per_byte[mine] * piece
            delay[child[which]] = edges.delay[mine]
            parts[which][way] = (service, delay)
            at = mine.stop
    for which, parents in enumerate(trees):
        have = ready
        if ups:
            have = up_tree(parents, ready, *parts[which]["up"], tick)
        if downs:
            have = down_tree(parents, have[parents == TOP][0], *parts[which]["down"], tick)
        finish = np.maximum(finish, have)
        depth = max(depth, math.ceil(math.log2(nodes)) * (ups + downs))
        services = [service.max() * chunks for service, _ in parts[which].values()]
        delays = [delay.max() for _, delay in parts[which].values()]
        alone = max(alone, max(services) + depth * max(delays))
    return Far(finish, depth, edges.flows, edges.sharing, alone)


def _trees(op: Collective, nodes: int) -> list[np.ndarray]:
    """Both trees. Those of an all-reduce may have different roots; a broadcast has one root that feeds both."""
    if op == "all_reduce":
        return list(double_tree_parents(nodes))
    others = double_tree_parents(nodes - 1)
    return [np.concatenate([[TOP], np.where(p == TOP, 0, p + 1)]) for p in others]


def _ring(network: RailNetwork, op: Collective, size: float, ready: np.ndarray, tick: Tick) -> Far:
    nodes, chunks = ready.shape
    node = np.arange(nodes)
    edges = network.edges(node, (node + 1) % nodes)
    steps = (nodes - 1) * (2 if op == "all_reduce" else 1)
    service = edges.us_per_byte * size / nodes
    begin = ready[:, 0]  # slices run behind each other; the first may begin
    finish_us = around_ring(begin, steps, service, edges.delay, tick)
    share_left = 1 - np.arange(1, chunks + 1) / chunks
    spread = np.maximum(finish_us[:, None] - share_left * (finish_us.min() - begin.max()), ready)
    alone = float(steps * (service.max() + edges.delay.mean()))
    return Far(np.maximum.accumulate(spread, axis=1), steps, edges.flows, edges.sharing, alone)


def _pat(network: RailNetwork, op: Collective, size: float, ready: np.ndarray, tick: Tick) -> Far:
    """Distances 1, 2, 4, ..: what is gathered doubles each round; backwards it reduces."""
    nodes, chunks = ready.shape
    node, gather, flows, sharing = np.arange(nodes), [], 0, 0
    reach = 1
    while reach < nodes:
        source = (node + reach) % nodes
        edges = network.edges(source, node)
        service = np.empty(nodes)
        service[source] = edges.us_per_byte * size * min(reach, nodes - reach) / nodes
        delay = np.empty(nodes)
        delay[source] = edges.delay
        gather.append((source, service, delay))
        flows, sharing = flows + edges.flows, max(sharing, edges.sharing)
        reach *= 2
    rounds = [] if op == "reduce_scatter" else gather
    if op != "all_gather":
        backwards = [((node - (1 << k)) % nodes, s, d) for k, (_, s, d) in enumerate(gather)]
        rounds = backwards[::-1] + rounds
    begin = ready[:, -1] if op != "all_gather" else ready[:, 0]  # rounds work on whole vectors
    finish_us = by_doubling(begin, rounds, tick)
    alone = float(sum(service.max() + delay.max() for _, service, delay in rounds))
    finish = np.maximum(np.tile(finish_us[:, None], (1, chunks)), ready)
    return Far(finish, len(rounds), flows, sharing, alone)


def _shifts(network: RailNetwork, size: float, ready: np.ndarray) -> Far:
    """All-to-all: in turn every node sends to the one d further; some of the turns are routed."""
    nodes, chunks = ready.shape
    node = np.arange(nodes)
    turns = np.unique(np.linspace(1, nodes - 1, min(SAMPLED, nodes - 1)).astype(np.int64))
    spent, flows, sharing = np.zeros(nodes), 0, 0
    for turn in turns:
        edges = network.edges(node, (node + turn) % nodes)
        # The next message is posted while this one travels: only its bytes take time.
        spent += edges.us_per_byte * size / nodes
        flows, sharing = flows + edges.flows, max(sharing, edges.sharing)
    total = spent * (nodes - 1) / len(turns)
    delay = float(delay_us(network.top, node[:1], node[-1:])[0])
    shares = np.linspace(1 / chunks, 1, chunks)
    finish = np.maximum(ready + delay, ready[:, :1] + total[:, None] * shares + delay)
    return Far(finish, nodes - 1, flows, sharing, float(total.max()) + delay)
