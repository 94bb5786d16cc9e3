"""Max-min fair rates of flows that share links, by progressive filling.

All rates grow together until a link is full; its flows stop there, the others go on:

    link A: flows 1 2      link B: flows 2 3 4        B is full first: 2, 3, 4 get B/3, 1 gets the rest of A

No flow can get more without taking from one that has no more than it. Congestion control that works
well ends near it. Knows rates, not time.
"""

import numpy as np

from cairn.comm.simulate.topology import NO_LINK

TINY = 1e-12


def max_min(
    paths: np.ndarray,
    gb_per_s: np.ndarray,
    weight: np.ndarray | None = None,
    tolerance: float = 0.0,
) -> np.ndarray:
    """The rate of each flow. `paths` is [flows, hops] of links; a flow of weight 2 counts as two.

    With a tolerance, links that are full within that share of each other stop together: a flow then
    gets up to so much less than its due, and a hundred thousand flows take a moment.
    """
    weight = np.ones(len(paths)) if weight is None else weight
    rate = np.zeros(len(paths))
    growing = np.arange(len(paths))
    left = gb_per_s.astype(float).copy()
    real = paths != NO_LINK
    owner, link = np.nonzero(real)[0], paths[real]
    level = 0.0  # what every growing flow has, for each unit of its weight
    while len(growing):
        load = np.bincount(link, weights=weight[owner], minlength=len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(load > 0, np.maximum(left, 0.0) / load, np.inf)
        step = float(share.min(initial=np.inf))
        if not np.isfinite(step):
            rate[growing] = np.inf
            break
        level += step
        left -= load * step
        full = share <= step * (1 + TINY) + tolerance * level + TINY
        stopped = np.zeros(len(paths), dtype=bool)
        stopped[owner[full[link]]] = True
        rate[growing] = level * weight[growing]
        growing = growing[~stopped[growing]]
        goes_on = ~stopped[owner]
        owner, link = owner[goes_on], link[goes_on]
    return rate


def connection_rates(
    paths: np.ndarray,
    connection: np.ndarray,
    connections: int,
    gb_per_s: np.ndarray,
    tolerance: float = 0.05,
) -> np.ndarray:
    """Rates of connections that split their bytes evenly over several flows; the slowest flow decides.

    A connection counts as one, however many flows it has.
    """
    flows = np.bincount(connection, minlength=connections)
    rate = max_min(paths, gb_per_s, 1 / flows[connection], tolerance)
    slowest = np.full(connections, np.inf)
    np.minimum.at(slowest, connection, rate)
    return slowest * flows
