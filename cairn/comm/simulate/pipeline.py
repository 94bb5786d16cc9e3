"""When does each chunk arrive? Schedules over many nodes, chunk behind chunk, in numpy.

A link sends its chunks in order, each when it is there and the link is free:

    done[c] = max(ready[c], done[c - 1]) + service   =>   service * (c + 1) + running max of (ready - c * service)

so a whole tree level of a hundred thousand chunks is one `maximum.accumulate`. Times are in
microseconds; the last axis of an array is the chunk. Knows neither bytes nor fabrics: every edge
brings its service time of a chunk and its delay.
"""

from collections.abc import Callable

import numpy as np

from cairn.comm.schedule.tree import TOP, depths

Tick = Callable[[str], None]


def through(ready: np.ndarray, service: np.ndarray | float) -> np.ndarray:
    """When each chunk has left a link that sends one after another."""
    place = np.arange(ready.shape[-1])
    each = np.asarray(service)[..., None]
    return each * (place + 1) + np.maximum.accumulate(ready - place * each, axis=-1)


def up_tree(
    parents: np.ndarray,
    ready: np.ndarray,
    service: np.ndarray,
    delay: np.ndarray,
    tick: Tick = lambda what: None,
) -> np.ndarray:
    """Reduce towards the root: `service[n]` and `delay[n]` are of the edge from n to its parent.

    The result is when each node has the sum of all below it; for the root, of everything.
    """
    level = depths(parents)
    have = ready.copy()
    for depth in range(int(level.max(initial=0)), 0, -1):
        nodes = np.flatnonzero(level == depth)
        arrived = through(have[nodes], service[nodes]) + delay[nodes, None]
        order = np.argsort(parents[nodes], kind="stable")
        first = np.flatnonzero(np.diff(parents[nodes][order], prepend=-2))
        above = parents[nodes][order][first]
        have[above] = np.maximum(have[above], np.maximum.reduceat(arrived[order], first, axis=0))
        tick(f"up {depth}")
    return have


def down_tree(
    parents: np.ndarray,
    ready: np.ndarray,
    service: np.ndarray,
    delay: np.ndarray,
    tick: Tick = lambda what: None,
) -> np.ndarray:
    """Broadcast down a tree: `ready` is [chunks] at the root; returns when each node has each chunk."""
    level = depths(parents)
    have = np.empty((len(parents), ready.shape[-1]))
    have[parents == TOP] = ready
    for depth in range(1, int(level.max(initial=0)) + 1):
        nodes = np.flatnonzero(level == depth)
        have[nodes] = through(have[parents[nodes]], service[nodes]) + delay[nodes, None]
        tick(f"down {depth}")
    return have


def around_ring(
    ready: np.ndarray,
    steps: int,
    service: np.ndarray,
    delay: np.ndarray,
    tick: Tick = lambda what: None,
) -> np.ndarray:
    """`steps` times every node hands a piece to its right; `service[n]` is of the edge n -> n+1.

    A node sends step s when it has what step s - 1 brought, and when its link is free.
    """
    have, free = ready.copy(), ready.copy()
    for step in range(steps):  # in place: at a hundred thousand GPUs this is 24,000 steps
        np.maximum(have, free, out=free)
        np.add(free, service, out=free)
        np.add(free[:-1], delay[:-1], out=have[1:])
        have[0] = free[-1] + delay[-1]
        if step % max(steps // 8, 1) == 0:
            tick(f"step {step}")
    return have


def by_doubling(
    ready: np.ndarray,
    rounds: list[tuple[np.ndarray, np.ndarray, np.ndarray]],
    tick: Tick = lambda what: None,
) -> np.ndarray:
    """Each round: (from whom, service, delay) of every node; it goes on when it has sent and received."""
    have = ready.copy()
    for number, (source, service, delay) in enumerate(rounds):
        sent = have + service
        have = np.maximum(sent, (sent + delay)[source])
        tick(f"round {number}")
    return have
