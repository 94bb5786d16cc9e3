"""Queues that may not drop: incast, pause frames (PFC), and the deadlock they can make.

    sender -> [queue] link -> [queue] link -> [queue] -> receiver

Every link has a queue at its far end. When the queue is filled to `pause`, the sender that feeds it must
stop (PFC pauses a whole port, whatever the flow); below `resume` it may go on. So a receiver that is
overloaded stops the links that lead to it, then those that lead there, and flows that only share a
link with the crowd suffer with it. If the paused links form a cycle, no sender can ever go on.

Time goes in ticks; in each a link moves at most its capacity, shared by the flows in its queue as
they fill it. Fluid, not packets: good for who is stopped by whom and for how long, to within a tick.
"""

import itertools
from typing import NamedTuple

import msgspec
import numpy as np

from cairn.comm.simulate.topology import NO_LINK
from cairn.core.errors import ConfigError


class Switching(msgspec.Struct, frozen=True, kw_only=True):
    tick_us: float = 0.5
    buffer_bytes: float = 512e3  # of each port
    pause: float = 0.6  # of the buffer
    resume: float = 0.3


USUAL = Switching()
MOST = 2048  # senders or switches that are simulated


class FlowHistory(NamedTuple):
    """Result of a simulation of a lossless fabric."""

    finish_us: np.ndarray  # of each flow; inf: never
    paused_us: np.ndarray  # of each link: how long it had to stop
    deadlock: tuple[int, ...]  # links that wait for each other in a circle; empty: none
    us: float


def run_lossless(
    paths: np.ndarray,
    size: np.ndarray,
    gb_per_s: np.ndarray,
    switching: Switching = USUAL,
    most_ticks: int = 200_000,
) -> FlowHistory:
    """`paths` is [flows, hops]; every flow starts at once and sends `size` bytes."""
    _check(paths, size, gb_per_s, switching)
    flows, hops = paths.shape
    packed, length = _packed(paths, len(gb_per_s))
    per_tick = np.append(gb_per_s * 1e3 * switching.tick_us, 0.0)
    waiting_bytes = np.zeros((flows, hops + 1))  # bytes before hop h; 0: at the sender
    waiting_bytes[:, 0] = size
    delivered = np.zeros(flows)
    paused = np.zeros(len(per_tick), dtype=bool)
    paused_us, finish = np.zeros(len(per_tick)), np.full(flows, np.inf)
    row = np.arange(flows)
    for tick in range(most_ticks):
        moved = _move(packed, waiting_bytes, per_tick, paused)
        waiting_bytes[:, :-1] -= moved
        waiting_bytes[:, 1:] += moved
        delivered += waiting_bytes[row, length]
        waiting_bytes[row, length] = 0.0
        now_done = (delivered >= size * (1 - 1e-9)) & np.isinf(finish)
        finish[now_done] = (tick + 1) * switching.tick_us
        if np.isfinite(finish).all():
            break
        queued = _queued(packed, waiting_bytes, len(per_tick))
        paused |= queued >= switching.pause * switching.buffer_bytes
        paused &= queued > switching.resume * switching.buffer_bytes
        paused_us += paused * switching.tick_us
        if moved.sum() <= 1e-9 * per_tick.max():
            circle = _circle(packed, waiting_bytes, paused)
            return FlowHistory(finish, paused_us[:-1], circle, (tick + 1) * switching.tick_us)
    return FlowHistory(finish, paused_us[:-1], (), float(np.max(finish)))


def can_deadlock(paths: np.ndarray) -> tuple[int, ...]:
    """A circle of links, each followed by the next on some path: without one there is no deadlock."""
    following: dict[int, set[int]] = {}
    for row in paths:
        links = [int(link) for link in row if link != NO_LINK]
        for one, other in itertools.pairwise(links):
            following.setdefault(one, set()).add(other)
    return _find_circle(following)


def incast(
    senders: int, size: float, nic_gb_per_s: float = 50.0, switching: Switching = USUAL
) -> FlowHistory:
    """All at one receiver, and one bystander that shares only the first switch with them.

    sender i --(i)--> leaf 0 --(uplink)--> leaf 1 --(port)--> receiver
    bystander -----------> leaf 0 --(uplink)--> leaf 1 ------> its own port
    """
    if not 1 <= senders <= MOST:
        raise ConfigError(f"{senders} senders", hint=f"from 1 to {MOST}")
    uplink, port, other = senders + 1, senders + 2, senders + 3
    paths = np.array([[i, uplink, port] for i in range(senders)] + [[senders, uplink, other]])
    rate = np.full(senders + 4, nic_gb_per_s)
    rate[uplink] = nic_gb_per_s * senders  # the fabric itself has room enough
    room = switching.buffer_bytes * (1 - switching.pause) / 2
    tick = min(switching.tick_us, room / (1e3 * float(rate.max())))
    switching = msgspec.structs.replace(switching, tick_us=tick)
    return run_lossless(paths, np.full(senders + 1, float(size)), rate, switching)


def circle(
    switches: int,
    size: float,
    nic_gb_per_s: float = 50.0,
    hops: int = 3,
    switching: Switching = USUAL,
) -> tuple[np.ndarray, FlowHistory]:
    """Switches in a ring, a host at each that sends over `hops` links of it: paths, and what happens.

    Links 0 .. n-1 are the ring, then those of senders and of receivers.
    """
    if not 3 <= switches <= MOST or not 1 <= hops < switches:
        raise ConfigError(
            f"a ring of {switches} switches, flows over {hops} links of it",
            hint=f"from 4 to {MOST} switches, flows over fewer links than that",
        )
    n = switches
    paths = np.array(
        [[n + i, *((i + k) % n for k in range(hops)), 2 * n + (i + hops - 1) % n] for i in range(n)]
    )
    rate = np.full(3 * n, nic_gb_per_s)
    return paths, run_lossless(paths, np.full(n, float(size)), rate, switching)


def _packed(paths: np.ndarray, none: int) -> tuple[np.ndarray, np.ndarray]:
    """Paths without gaps, filled up with the link `none` that carries nothing; and how many links each has."""
    real = paths != NO_LINK
    place = np.cumsum(real, axis=1) - 1
    packed = np.full(paths.shape, none)
    flow, hop = np.nonzero(real)
    packed[flow, place[flow, hop]] = paths[flow, hop]
    return packed, real.sum(axis=1)


def _queued(packed: np.ndarray, waiting_bytes: np.ndarray, links: int) -> np.ndarray:
    """Bytes in the queue at the far end of each link: those that wait for the next hop."""
    if packed.shape[1] < 2:
        return np.zeros(links)
    waiting = waiting_bytes[:, 1:-1].ravel()
    return np.bincount(packed[:, :-1].ravel(), weights=waiting, minlength=links)


def _move(
    packed: np.ndarray, waiting_bytes: np.ndarray, per_tick: np.ndarray, paused: np.ndarray
) -> np.ndarray:
    """[flows, hops]: bytes that cross each hop; a paused link carries none."""
    there = waiting_bytes[:, :-1] * (packed < len(per_tick) - 1)
    demand = np.bincount(packed.ravel(), weights=there.ravel(), minlength=len(per_tick))
    room = np.where(paused, 0.0, per_tick)
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.where(demand > 0, np.minimum(room / demand, 1.0), 0.0)
    return there * share[packed]


def _circle(packed: np.ndarray, waiting_bytes: np.ndarray, paused: np.ndarray) -> tuple[int, ...]:
    """A paused link waits for the next hop of those whose bytes fill its queue."""
    waits: dict[int, set[int]] = {}
    for flow, hop in zip(*np.nonzero(waiting_bytes[:, 1:-1] > 0), strict=True):
        one, other = int(packed[flow, hop]), int(packed[flow, hop + 1])
        if paused[one]:
            waits.setdefault(one, set()).add(other)
    return _find_circle(waits)


def _find_circle(following: dict[int, set[int]]) -> tuple[int, ...]:
    explored: set[int] = set()
    for begin in following:
        trail: list[int] = []
        stack = [(begin, iter(sorted(following.get(begin, ()))))]
        on_trail = {begin}
        trail.append(begin)
        while stack:
            node, rest = stack[-1]
            after = next(rest, None)
            if after is None:
                stack.pop()
                explored.add(node)
                on_trail.discard(trail.pop())
            elif after in on_trail:
                return tuple(trail[trail.index(after) :])
            elif after not in explored:
                stack.append((after, iter(sorted(following.get(after, ())))))
                trail.append(after)
                on_trail.add(after)
    return ()


def _check(paths: np.ndarray, size: np.ndarray, gb_per_s: np.ndarray, switching: Switching) -> None:
    if (size <= 0).any() or (gb_per_s <= 0).any():
        raise ConfigError("a flow without bytes or a link without bandwidth", hint="leave it out")
    if not 0 < switching.resume < switching.pause < 1 or switching.tick_us <= 0:
        raise ConfigError(
            f"pause at {switching.pause}, resume at {switching.resume} of the buffer",
            hint="0 < resume < pause < 1",
        )
    if (paths == NO_LINK).all(axis=1).any():
        raise ConfigError("a flow without a single link")
    fastest = float(gb_per_s.max()) * 1e3 * switching.tick_us
    if fastest > switching.buffer_bytes * (1 - switching.pause):
        raise ConfigError(
            f"a tick brings {fastest:.0f} bytes, the buffer of {switching.buffer_bytes:.0f} has no "
            f"room for them after the pause",
            hint="a shorter tick, a larger buffer, or an earlier pause",
        )
