"""What is wrong with a cluster: slow NICs, late ranks, links that are down.

A fault is drawn by a seed, so a simulation can be repeated. A NIC that is dead does not stop the
job: its rank's bytes leave over the NIC of its neighbour, which then carries both. A link between
switches that is down makes its flows find another way, onto links that others use.
"""

import msgspec
import numpy as np

from cairn.comm.simulate.topology import Links, Topology
from cairn.core.errors import ConfigError


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
    names: list[str]  # what was done, for people


HEALTHY = Faults()


def check(faults: Faults, top: Topology) -> None:
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
        raise ConfigError(f"{faults.stragglers} stragglers of {top.nodes} nodes")
    if faults.dead_nics and top.domain < 2:
        raise ConfigError(
            "a dead NIC of a node with one GPU cuts the node off", hint="larger --domain"
        )
    if top.tiers == 0 and (faults.slow_nics or faults.dead_nics or faults.dead_links):
        raise ConfigError("one NVLink domain has no NICs", hint="use a rail topology")


def lateness(faults: Faults, top: Topology) -> np.ndarray:
    """Microseconds for each node."""
    late = np.zeros(top.nodes)
    generator = np.random.default_rng([faults.seed, 1])
    late[generator.choice(top.nodes, faults.stragglers, replace=False)] = faults.late_us
    return late


def touched(faults: Faults, top: Topology) -> set[int]:
    """The planes on which some NIC is slow or dead."""
    slow, dead = _drawn(faults, top)
    planes = {plane for gpu in slow for plane, _ in _where(top, int(gpu), "slow")}
    return planes | {plane for gpu in dead for plane, _ in _where(top, int(gpu), "dead")}


def _drawn(faults: Faults, top: Topology) -> tuple[np.ndarray, np.ndarray]:
    slow = np.random.default_rng([faults.seed, 2]).choice(top.gpus, faults.slow_nics, replace=False)
    dead = np.random.default_rng([faults.seed, 3]).choice(top.gpus, faults.dead_nics, replace=False)
    return slow, dead


def apply(faults: Faults, top: Topology, at: Links, plane: int) -> Applied:
    rate, names = at.gb_per_s.copy(), []
    slow, dead = _drawn(faults, top)
    for gpu, factor, what in [
        *((int(gpu), faults.slow_factor, "slow") for gpu in slow),
        *((int(gpu), 0.5, "dead") for gpu in dead),
    ]:
        for which, end in _where(top, gpu, what):
            if which == plane:
                rate[[at.nic_up + end, at.nic_down + end]] *= factor
                node, rail = divmod(gpu, top.domain)
                names.append(f"{what} NIC {rail} of node {node}")
    return Applied(
        gb_per_s=rate, dead=_dead_links(faults, top, at, plane), names=sorted(set(names))
    )


def _where(top: Topology, gpu: int, what: str) -> list[tuple[int, int]]:
    """Plane and place of the NICs that a fault touches: a dead one also halves its stand-in."""
    node, rail = divmod(gpu, top.domain)
    rails = [rail] if what == "slow" else [rail, (rail + 1) % top.domain]
    if top.planes == 1:
        return [(0, node * top.domain + one) for one in rails]
    return [(one, node) for one in rails]


def _dead_links(faults: Faults, top: Topology, at: Links, plane: int) -> np.ndarray | None:
    uplinks = at.leaf_down - at.leaf_up
    count = round(faults.dead_links * uplinks)
    if not count:
        return None
    dead = np.zeros(len(at.gb_per_s), dtype=bool)
    chosen = np.random.default_rng([faults.seed, 4, plane]).choice(uplinks, count, replace=False)
    dead[at.leaf_up + chosen] = dead[at.leaf_down + chosen] = True
    return dead
