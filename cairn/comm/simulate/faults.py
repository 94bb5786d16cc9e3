"""Faults of a simulated cluster: slow NICs, late ranks, links that are down.

A fault is drawn by a seed, so a simulation can be repeated. A NIC that is dead does not stop the
job: its rank's bytes leave over the next NIC of the node that lives, which then carries both; a node
without any is refused, since no job could go on. A link between switches that is down makes its
flows find another way, onto links that others use.
"""

from collections import defaultdict

import msgspec
import numpy as np

from cairn.comm.simulate.topology import FabricTopology, Links, links
from cairn.core.errors import ConfigError
from cairn.core.units import format_duration


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    slow_nics: int = 0
    slow_factor: float = 0.25  # of their bandwidth
    dead_nics: int = 0
    dead_links: float = 0.0  # share of the links from leaves to spines
    stragglers: int = 0  # nodes that come late
    late_us: float = 0.0
    seed: int = 0


class Applied(msgspec.Struct, frozen=True, kw_only=True):
    """The faults of one plane."""

    gb_per_s: np.ndarray  # of each link
    dead: np.ndarray | None  # which links are down


HEALTHY = Faults()


def check(faults: Faults, top: FabricTopology) -> None:
    if not 0 < faults.slow_factor <= 1:
        raise ConfigError(
            f"a slow NIC at {faults.slow_factor} of its rate", hint="more than 0, at most 1"
        )
    if not 0 <= faults.dead_links < 1:
        raise ConfigError(f"{faults.dead_links} of the links are down", hint="from 0 to below 1")
    if faults.late_us < 0 or faults.seed < 0:
        raise ConfigError(
            f"stragglers that are {faults.late_us} us late, seed {faults.seed}", hint="zero or more"
        )
    counts = {"slow NICs": faults.slow_nics, "dead NICs": faults.dead_nics}
    for what, count in counts.items():
        if not 0 <= count <= top.gpus:
            raise ConfigError(f"{count} {what} of {top.gpus}", hint="from none to all")
    if not 0 <= faults.stragglers <= top.nodes:
        raise ConfigError(
            f"{faults.stragglers} stragglers of {top.nodes} nodes", hint="from none to all"
        )
    if faults.dead_nics and top.domain < 2:
        raise ConfigError(
            "a dead NIC of a node with one GPU cuts the node off", hint="larger --domain"
        )
    if top.tiers == 0 and (faults.slow_nics or faults.dead_nics or faults.dead_links):
        raise ConfigError("one NVLink domain has no NICs", hint="use a rail topology")
    nic_shares(faults, top)


def lateness(faults: Faults, top: FabricTopology) -> np.ndarray:
    """Microseconds for each node."""
    late = np.zeros(top.nodes)
    late[_late(faults, top)] = faults.late_us
    return late


def describe(faults: Faults, top: FabricTopology) -> list[str]:
    """Describe the sampled faults."""
    slow, dead = _drawn(faults, top)
    words = [f"slow NIC {rail} of node {node}" for node, rail in sorted(slow - dead)]
    words += [f"dead NIC {rail} of node {node}" for node, rail in sorted(dead)]
    if faults.dead_links and top.tiers:
        at = links(top)
        count, uplinks = _count(faults, at), at.leaf_down - at.leaf_up
        words.append(f"{count} of {uplinks} links between leaves and spines of a rail down")
    late = sorted(_late(faults, top).tolist()) if faults.late_us else []
    return words + [f"node {node} late by {format_duration(faults.late_us / 1e6)}" for node in late]


def touched(faults: Faults, top: FabricTopology) -> set[int]:
    """The planes on which some NIC is slow or dead."""
    return {0 if top.planes == 1 else rail for _, rail in nic_shares(faults, top)}


def nic_shares(faults: Faults, top: FabricTopology) -> dict[tuple[int, int], float]:
    """Share of a NIC's rate that its rank has, by node and rail; healthy NICs are omitted."""
    slow, dead = _drawn(faults, top)
    shares = dict.fromkeys(slow - dead, faults.slow_factor)
    dead_rails: dict[int, set[int]] = defaultdict(set)
    for node, rail in dead:
        dead_rails[node].add(rail)
    for node, rails in dead_rails.items():
        if len(rails) == top.domain:
            raise ConfigError(
                f"all {top.domain} NICs of node {node} are dead: it is cut off, and the job stands",
                hint="fewer --dead-nics, or another --seed",
            )
        carried: dict[int, list[int]] = defaultdict(list)
        for rail in rails:
            ahead = ((rail + away) % top.domain for away in range(1, top.domain))
            carried[next(one for one in ahead if one not in rails)].append(rail)
        for living, others in carried.items():
            share = shares.get((node, living), 1.0) / (1 + len(others))
            shares |= {(node, rail): share for rail in (living, *others)}
    return shares


def apply(faults: Faults, top: FabricTopology, at: Links, plane: int) -> Applied:
    rate = at.gb_per_s.copy()
    for (node, rail), share in nic_shares(faults, top).items():
        if top.planes == 1 or rail == plane:
            end = node * top.domain + rail if top.planes == 1 else node
            rate[[at.nic_up + end, at.nic_down + end]] *= share
    return Applied(gb_per_s=rate, dead=_dead_links(faults, top, at, plane))


def _drawn(
    faults: Faults, top: FabricTopology
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Slow and dead NICs, by node and rail."""
    devices = []
    for salt, count in ((2, faults.slow_nics), (3, faults.dead_nics)):
        gpus = np.random.default_rng([faults.seed, salt]).choice(top.gpus, count, replace=False)
        devices.append({divmod(int(gpu), top.domain) for gpu in gpus})
    return devices[0], devices[1]


def _late(faults: Faults, top: FabricTopology) -> np.ndarray:
    generator = np.random.default_rng([faults.seed, 1])
    return generator.choice(top.nodes, faults.stragglers, replace=False)


def _count(faults: Faults, at: Links) -> int:
    """Links between leaves and spines that are down, of one plane."""
    return round(faults.dead_links * (at.leaf_down - at.leaf_up))


def _dead_links(faults: Faults, top: FabricTopology, at: Links, plane: int) -> np.ndarray | None:
    uplinks, count = at.leaf_down - at.leaf_up, _count(faults, at)
    if not count:
        return None
    dead = np.zeros(len(at.gb_per_s), dtype=bool)
    chosen = np.random.default_rng([faults.seed, 4, plane]).choice(uplinks, count, replace=False)
    dead[at.leaf_up + chosen] = dead[at.leaf_down + chosen] = True
    return dead
