"""The link graph of a cluster: which links a message crosses, by arithmetic instead of a table.

    GPU --NVLink-- GPU          inside a domain
     |
    NIC            one for each GPU; NIC g of every node is on rail g
     |
    leaf           radix/2 NICs below, radix/2/oversubscription uplinks
     |
    spine          u-th uplink of every leaf of a pod leads to spine u of the pod
     |
    core           (u, v) joins the spines u of all pods

A rail fabric has a plane of such switches for each rail; a fat tree has one plane, and all NICs of a
node are under the same leaf. Which of several equal paths a flow takes is decided by a hash of its
ends (ECMP), or it is spread over all of them. Links are numbered, so a hundred thousand flows are
routed by a few numpy expressions. Knows bandwidth and delay, not queues.
"""

import math
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np

from cairn.core.errors import ConfigError, did_you_mean

Name = Literal["nvlink", "rail-1tier", "rail-2tier", "rail-3tier", "fat-tree"]
NAMES: tuple[Name, ...] = get_args(Name)
TIERS: dict[Name, int] = {
    "nvlink": 0,
    "rail-1tier": 1,
    "rail-2tier": 2,
    "rail-3tier": 3,
    "fat-tree": 3,
}
Balance = Literal["ecmp", "spread"]
HOST_US = 4.5  # posting, DMA and completion of a message
SWITCH_US = 0.6  # through one switch and its cables
NO_LINK = -1
LARGEST_DOMAIN = 576  # of what has been announced
MOST_PATHS = 256
MIX = np.uint64(0x9E3779B97F4A7C15)


class FabricTopology(msgspec.Struct, frozen=True, kw_only=True):
    """A cluster of equal nodes. GB/s are 1e9 bytes, in each direction."""

    name: Name
    gpus: int
    domain: int  # GPUs of an NVLink domain
    nvlink_gb_per_s: float  # of each GPU
    nic_gb_per_s: float  # of each GPU
    radix: int  # ports of a switch
    oversubscription: float  # of the leaves: bandwidth below / above
    balance: Balance
    paths: int  # flows (queue pairs) of a connection, each hashed for itself
    nvlink_us: float = 1.0
    host_us: float = HOST_US

    @property
    def nodes(self) -> int:
        return self.gpus // self.domain

    @property
    def tiers(self) -> int:
        return TIERS[self.name]

    @property
    def planes(self) -> int:
        return 1 if self.name == "fat-tree" else self.domain

    @property
    def ends(self) -> int:
        """NICs of a plane."""
        return self.gpus // self.planes

    @property
    def below(self) -> int:
        """NICs of a leaf."""
        return self.ends if self.tiers == 1 else self.radix // 2

    @property
    def uplinks(self) -> int:
        """Uplinks of a leaf, which is also the number of spines of a pod."""
        return max(1, int(self.below / self.oversubscription))

    @property
    def leaves_per_pod(self) -> int:
        return self.radix if self.tiers == 2 else self.radix // 2

    @property
    def cores(self) -> int:
        """Uplinks of a spine."""
        return self.radix // 2

    @property
    def choices(self) -> tuple[int, int]:
        """Uplinks of a leaf and of a spine among which a hash chooses; spread over all, they are one."""
        return (self.uplinks, self.cores) if self.balance == "ecmp" else (1, 1)


class Links(NamedTuple):
    """The first index of each link type in the numbering of a plane, and the rate of each link."""

    nic_up: int
    nic_down: int
    leaf_up: int
    leaf_down: int
    spine_up: int
    spine_down: int
    gb_per_s: np.ndarray


def topology(
    name: str,
    gpus: int,
    *,
    domain: int = 8,
    nvlink_gb_per_s: float = 360.0,
    nic_gb_per_s: float = 50.0,
    radix: int = 64,
    oversubscription: float = 1.0,
    balance: Balance = "ecmp",
    paths: int = 4,
    host_us: float = HOST_US,
) -> FabricTopology:
    """Checked: what cannot be built is refused with the numbers that say why."""
    if name not in TIERS:
        raise ConfigError(
            f"unknown topology '{name}'", hint=did_you_mean(name, NAMES, f"one of {_listed()}")
        )
    if gpus < 2:
        raise ConfigError(f"{gpus} GPU(s) have nothing to exchange", hint="use two or more")
    if name == "nvlink":
        domain = gpus
    if domain < 1 or gpus % domain:
        raise ConfigError(
            f"{gpus} GPUs do not fill nodes of {domain}",
            hint=f"use {max(gpus // max(domain, 1), 1) * max(domain, 1)} GPUs, or another --domain",
        )
    if domain > LARGEST_DOMAIN:
        raise ConfigError(
            f"an NVLink domain of {domain:,} GPUs",
            hint=f"up to {LARGEST_DOMAIN} GPUs; join several by a rail topology",
        )
    for what, value in (("NVLink", nvlink_gb_per_s), ("network", nic_gb_per_s)):
        if not 0 < value < math.inf:
            raise ConfigError(f"a {what} of {value} GB/s", hint="400 Gbit/s are 50 GB/s")
    if (
        radix < 4
        or radix % 2
        or not 1 <= paths <= MOST_PATHS
        or not 1 <= oversubscription <= radix / 2
    ):
        raise ConfigError(
            f"switches of {radix} ports, {oversubscription}:1 oversubscribed, {paths} paths",
            hint="ports are even and four or more; 1 <= oversubscription <= ports / 2; "
            f"1 <= paths <= {MOST_PATHS}",
        )
    built = FabricTopology(
        name=name,
        gpus=gpus,
        domain=domain,
        nvlink_gb_per_s=nvlink_gb_per_s,
        nic_gb_per_s=nic_gb_per_s,
        radix=radix,
        oversubscription=oversubscription,
        balance=balance,
        paths=paths,
        host_us=host_us,
    )
    _fits(built)
    return built


def most_ends(tiers: int, radix: int) -> int:
    """NICs that a plane of so many tiers can have."""
    half = radix // 2
    return {0: 0, 1: radix, 2: half * radix, 3: half * half * radix}[tiers]


def links(top: FabricTopology) -> Links:
    leaves = -(-top.ends // top.below)
    pods = -(-leaves // top.leaves_per_pod)
    ups, cores = top.choices
    counts = [top.ends, top.ends]
    counts += [leaves * ups] * 2 if top.tiers >= 2 else [0, 0]
    counts += [pods * ups * cores] * 2 if top.tiers >= 3 else [0, 0]
    begins = np.concatenate([[0], np.cumsum(counts)])
    rate = np.full(int(begins[-1]), top.nic_gb_per_s)
    rate[begins[2] : begins[4]] *= top.uplinks / ups
    rate[begins[4] :] *= top.uplinks * top.cores / (ups * cores)
    return Links(*(int(begin) for begin in begins[:-1]), gb_per_s=rate)


def route(
    top: FabricTopology,
    source: np.ndarray,
    target: np.ndarray,
    path: np.ndarray | int,
    salt: int = 0,
    dead: np.ndarray | None = None,
) -> np.ndarray:
    """[flows, 6] links from NIC to NIC of one plane, NO_LINK where a flow turns round earlier.

    `dead` marks links that are down: a flow whose hash leads there is hashed again.
    """
    at, (ups, cores) = links(top), top.choices
    route_links = np.full((len(source), 6), NO_LINK, dtype=np.int64)
    route_links[:, 0], route_links[:, 5] = at.nic_up + source, at.nic_down + target
    leaf, other = source // top.below, target // top.below
    away = leaf != other
    if not away.any():
        return route_links
    pod, far = leaf // top.leaves_per_pod, other // top.leaves_per_pod
    beyond = pod != far
    lost = np.zeros(len(source), dtype=bool)
    for attempt in range(64):
        number = _hash(source, target, path, salt + 1000003 * attempt)
        up = (number % np.uint64(ups)).astype(np.int64)
        core = ((number >> np.uint64(32)) % np.uint64(cores)).astype(np.int64)
        again = lost if attempt else away
        route_links[again, 1] = at.leaf_up + leaf[again] * ups + up[again]
        route_links[again, 4] = at.leaf_down + other[again] * ups + up[again]
        high = again & beyond
        route_links[high, 2] = at.spine_up + (pod[high] * ups + up[high]) * cores + core[high]
        route_links[high, 3] = at.spine_down + (far[high] * ups + up[high]) * cores + core[high]
        if dead is None:
            return route_links
        lost = (dead[route_links] & (route_links != NO_LINK)).any(axis=1) & away
        if not lost.any():
            return route_links
    first = int(np.flatnonzero(lost)[0])
    raise ConfigError(
        f"no path is left from NIC {int(source[first])} to NIC {int(target[first])}",
        hint="fewer failed links",
    )


def delay_us(top: FabricTopology, source: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Latency from posting a message to its first byte, without queueing."""
    leaf, other = source // top.below, target // top.below
    switches = 1 + 2 * (leaf != other)
    switches = switches + 2 * (leaf // top.leaves_per_pod != other // top.leaves_per_pod)
    return top.host_us + SWITCH_US * switches


def _hash(source: np.ndarray, target: np.ndarray, path: np.ndarray | int, salt: int) -> np.ndarray:
    """ECMP hash of a flow: the same flow always takes the same path."""
    with np.errstate(over="ignore"):
        value = source.astype(np.uint64) * np.uint64(0x100000001B3) + target.astype(np.uint64)
        value = (value + np.asarray(path, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)) * MIX
        value = (value ^ (value >> np.uint64(29))) + np.uint64(salt % (1 << 63)) * np.uint64(
            0xBF58476D1CE4E5B9
        )
        value = (value ^ (value >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


def _fits(top: FabricTopology) -> None:
    if top.tiers == 0:
        return
    room = most_ends(top.tiers, top.radix)
    if top.ends <= room:
        return
    wider = next(r for r in range(top.radix, 1 << 20, 2) if most_ends(top.tiers, r) >= top.ends)
    if most_ends(3, top.radix) >= top.ends:
        other = "use rail-3tier, or "
    else:
        other = ""
    raise ConfigError(
        f"{top.ends:,} NICs of a plane do not fit {top.tiers} tier(s) of {top.radix}-port switches, "
        f"which join {room:,}",
        hint=f"{other}switches of {wider} ports (--radix {wider})",
    )


def _listed() -> str:
    return ", ".join(NAMES)
