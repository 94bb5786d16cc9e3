"""The model of NCCL's tuner in Python: the algorithm and protocol it chooses, and the predicted time.

    time = launch + ramp * sqrt(bytes) + min over (algorithm, protocol) of
               latency(steps, hops) + bytes / (scale * algorithm bandwidth)

Latencies and bandwidth rules are those of NCCL's tuner (2.26 to 2.30): a base and a cost for each hop by
algorithm (ring, tree, NVLS, NVLS tree, PAT), protocol (LL, LL128, Simple) and wire (NVLink, network);
LL spends half of the wire on flags, LL128 8 bytes of 128. What NCCL learns by searching the machine
(channels, bandwidth of each) stands in FABRICS.

Three constants calibrate it to a machine that was measured: `launch` (host and kernel start, which
the tuner leaves out), `ramp` (pipelines that fill, in the middle sizes), `scale` (of bandwidth). Where
clusters of one fabric differ in their number of nodes, three others: `launch`, `hop` (what a hop of the
network takes beyond the tuner's figure) and the rate of a NIC, because what differs is the network.
Does not know: the latency of switches, SHARP and other CollNet, symmetric kernels, NVLS for gather
and scatter, broken links.
"""

import itertools
import math
from typing import Literal, get_args

import msgspec
import numpy as np

from cairn.comm.nccl_tests import SweepPoint
from cairn.comm.schedule.ops import Collective
from cairn.core.errors import ConfigError, did_you_mean

Algorithm = Literal["tree", "ring", "nvls", "nvls_tree", "pat"]
Protocol = Literal["ll", "ll128", "simple"]
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
NCCL_COLLECTIVES: tuple[Collective, ...] = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
)

# Microseconds, by protocol (LL, LL128, Simple).
BASE_US: dict[Algorithm, tuple[float, float, float]] = {
    "tree": (6.8, 14.0, 8.4),
    "ring": (6.6, 14.0, 8.4),
    "nvls": (0, 0, 0),
    "nvls_tree": (0, 0, 0),
    "pat": (0, 0, 8.0),
}
NVLINK_HOP_US: dict[Algorithm, tuple[float, float, float]] = {
    "tree": (0.6, 1.25, 4.0),
    "ring": (0.6, 1.9, 3.4),
    "nvls": (0, 0, 25.0),
    "nvls_tree": (0, 0, 25.0),
    "pat": (0, 0, 4.0),
}
NETWORK_HOP_US: dict[Algorithm, tuple[float, float, float]] = {
    "tree": (5.0, 8.5, 14.0),
    "ring": (2.7, 4.0, 14.0),
    "nvls": (0, 0, 0),
    "nvls_tree": (0, 0, 20.9),
    "pat": (0, 0, 14.0),
}
# The tree's bandwidth is less in the middle sizes: from 64 B, for every power of two.
TREE_SHARE: dict[Protocol, tuple[float, ...]] = {
    "ll": (1, 1, 1, 1, .9, .8, .7, .7, .7, .7, .6, .5, .4, .4, .5, .6, .7, .8, .9, 1, 1, 1, 1),
    "ll128": (1, 1, 1, 1, 1, .9, .8, .8, .8, .7, .6, .6, .6, .6, .6, .6, .8, .9, .9, .9, .9, 1, 1),
    "simple": (.9, .9, .9, .9, .9, .9, .9, .8, .7, .6, .6, .5, .5, .5, .5, .6, .7, .8, .7, .7, .8, .9, .9),
}  # fmt: skip
RING_PLATEAU = 1.4  # latency of a multi-node ring with Simple once every slice is 64 B
NETWORK_LL_GB_PER_S = (39.0, 20.4)  # two nodes, more; hosts of AMD: 22.5, 19.0
POST_US = (1.0, 1.0, 3.0)  # to post a message to the network, by protocol
SCALES = np.geomspace(0.2, 2.0, 93)  # of bandwidth, tried by `calibrate`


class Fabric(msgspec.Struct, frozen=True, kw_only=True):
    """The result of NCCL's topology search on a node of this type. GB/s are 1e9 bytes."""

    channels: int
    channel_gb_per_s: float
    ll_gb_per_s: float
    ll128_channel_gb_per_s: float
    tree_channel_gb_per_s: tuple[float, float, float]  # on one node, on two, on more
    tree_ll128_channel_gb_per_s: tuple[float, float, float]
    nvls_channels: int = 0  # 0: the switch does not reduce
    nvls_channel_gb_per_s: float = 0.0
    nvls_share: float = 1.0


_HOPPER = Fabric(
    channels=12, channel_gb_per_s=30.0, ll_gb_per_s=141.0, ll128_channel_gb_per_s=36.7,
    tree_channel_gb_per_s=(38.7, 41.4, 36.0), tree_ll128_channel_gb_per_s=(36.7, 36.7, 29.0),
    nvls_channels=8, nvls_channel_gb_per_s=45.0, nvls_share=0.85,
)  # fmt: skip
FABRICS: dict[str, Fabric] = {
    "a100": Fabric(
        channels=12, channel_gb_per_s=20.0, ll_gb_per_s=87.7, ll128_channel_gb_per_s=20.0,
        tree_channel_gb_per_s=(24.0, 23.6, 17.8), tree_ll128_channel_gb_per_s=(20.0, 20.0, 20.0),
    ),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Fabric(
        channels=12, channel_gb_per_s=60.0, ll_gb_per_s=282.0, ll128_channel_gb_per_s=40.0,
        tree_channel_gb_per_s=(77.4, 82.8, 72.0), tree_ll128_channel_gb_per_s=(40.0, 40.0, 40.0),
        nvls_channels=8, nvls_channel_gb_per_s=90.0, nvls_share=0.74,
    ),
}  # fmt: skip


class NcclCluster(msgspec.Struct, frozen=True, kw_only=True):
    fabric: Fabric
    gpus: int  # of each NVLink domain
    nodes: int
    nic_gb_per_s: float  # for each GPU
    hop_us: float = 0.0  # of the network, beyond what the tuner knows

    @property
    def ranks(self) -> int:
        return self.gpus * self.nodes


class NcclCalibration(msgspec.Struct, frozen=True, kw_only=True):
    """Constants of one machine, of which three are fitted; as they stand the model is NCCL's own."""

    launch_us: float = 0.0
    ramp_us: float = 0.0  # for a message of 1 MiB; grows with the square root
    scale: float = 1.0
    hop_us: float = 0.0
    nic_gb_per_s: float | None = None  # None: as the cluster says

    def applied(self, cluster: NcclCluster) -> NcclCluster:
        """The cluster with the network that was found."""
        nic = cluster.nic_gb_per_s if self.nic_gb_per_s is None else self.nic_gb_per_s
        return msgspec.structs.replace(cluster, nic_gb_per_s=nic, hop_us=self.hop_us)


UNCALIBRATED = NcclCalibration()


class NcclChoice(msgspec.Struct, frozen=True, kw_only=True):
    algorithm: Algorithm
    protocol: Protocol
    us: float


def cluster_of(fabric: str, gpus: int, nodes: int = 1, nic_gb_per_s: float = 50.0) -> NcclCluster:
    if fabric not in FABRICS:
        raise ConfigError(
            f"unknown fabric '{fabric}'",
            hint=did_you_mean(fabric, FABRICS, f"one of {', '.join(FABRICS)}"),
        )
    if gpus < 1 or nodes < 1 or gpus * nodes < 2:
        raise ConfigError(
            f"{nodes} node(s) of {gpus} GPU(s) have nothing to exchange",
            hint="use two GPUs or more",
        )
    if nic_gb_per_s <= 0:
        raise ConfigError(f"a network of {nic_gb_per_s} GB/s", hint="400 Gbit/s are 50 GB/s")
    return NcclCluster(fabric=FABRICS[fabric], gpus=gpus, nodes=nodes, nic_gb_per_s=nic_gb_per_s)


def times(
    cluster: NcclCluster,
    collective: Collective,
    size: int,
    calibration: NcclCalibration = UNCALIBRATED,
) -> list[NcclChoice]:
    """Every algorithm and protocol that can do it, fastest first."""
    cluster = calibration.applied(cluster)
    shared = calibration.launch_us + calibration.ramp_us * math.sqrt(size / (1 << 20))
    choices = []
    for algorithm, protocol in itertools.product(get_args(Algorithm), PROTOCOLS):
        rate = bandwidth(cluster, collective, algorithm, protocol)
        if rate <= 0:
            continue
        delay = latency_us(cluster, collective, algorithm, protocol)
        if algorithm == "tree":
            table = TREE_SHARE[protocol]
            step = max(size >> 6, 1).bit_length() - 1
            rate *= table[step] if step < len(table) else 1.0
        slice_bytes = size / (cluster.fabric.channels * cluster.ranks)
        if (algorithm, protocol, collective) == ("ring", "simple", "all_reduce"):
            delay *= RING_PLATEAU if cluster.nodes > 1 and slice_bytes >= 64 else 1.0
        us = shared + delay + size / (1e3 * rate * calibration.scale)
        choices.append(NcclChoice(algorithm=algorithm, protocol=protocol, us=us))
    return sorted(choices, key=lambda choice: choice.us)


def choose(
    cluster: NcclCluster,
    collective: Collective,
    size: int,
    calibration: NcclCalibration = UNCALIBRATED,
) -> NcclChoice:
    """The algorithm and protocol that NCCL uses for a vector of this size."""
    return times(cluster, collective, size, calibration)[0]


def bandwidth(
    cluster: NcclCluster, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    """Bytes of the vector per nanosecond (GB/s); 0 where NCCL does not have the pair."""
    n, fabric = cluster.ranks, cluster.fabric
    steps = _ring_steps(collective, n)
    wire = fabric.channels * fabric.channel_gb_per_s
    network = cluster.gpus * cluster.nic_gb_per_s
    if cluster.nodes > 1:
        wire = min(wire, network)
    match algorithm:
        case "ring":
            return _ring_bus(cluster, wire, protocol) * n / steps
        case "tree" if collective == "all_reduce":
            return 0.5 * _tree_bus(cluster, wire, protocol)
        case "nvls" if _switched(cluster, collective, protocol) and cluster.nodes == 1:
            return _nvls_bus(fabric) * n / steps
        case "nvls_tree" if _switched(cluster, collective, protocol) and cluster.nodes > 1:
            outside = network if cluster.nodes == 2 else network / 2
            return min(_nvls_bus(fabric), 2 * outside) * n / steps
        case "pat" if collective in ("all_gather", "reduce_scatter") and protocol == "simple":
            alone = cluster.gpus == 1 and cluster.nodes > 1
            return 0.75 * wire if alone else 0.0
    return 0.0


def latency_us(
    cluster: NcclCluster, collective: Collective, algorithm: Algorithm, protocol: Protocol
) -> float:
    which = PROTOCOLS.index(protocol)
    near, far = NVLINK_HOP_US[algorithm][which], NETWORK_HOP_US[algorithm][which]
    base, nodes = BASE_US[algorithm][which], cluster.nodes
    levels = nodes.bit_length() - 1
    if cluster.gpus == 1:
        far = NETWORK_HOP_US["tree"][which]  # nothing else hides the network
    far += cluster.hop_us
    match algorithm:
        case "ring" if collective in ("broadcast", "reduce"):
            return base + (far if nodes > 1 else near)
        case "ring":
            steps = _ring_steps(collective, cluster.ranks)
            outside = (nodes - 1) * (2 if collective == "all_reduce" else 1)
            inside = max(near, POST_US[which]) if nodes > 1 else near
            return base + (steps - outside) * inside + outside * far
        case "tree":
            return base + 2 * ((cluster.gpus - 1) * near + levels * far)
        case "nvls":
            return near
        case "nvls_tree":
            return near + 2 * levels * far
    return base + levels * far / 3.5 + cluster.ranks * 2.8  # PAT's latency still has a linear part


def calibrate(cluster: NcclCluster, points: list[SweepPoint]) -> tuple[NcclCalibration, float]:
    """The constants that fit an all-reduce sweep best, and the median relative error they leave.

    Launch and ramp enter linearly and are solved for; scale is searched.
    """
    if len(points) < 4:
        raise ConfigError(
            f"{len(points)} sizes cannot calibrate three constants", hint="measure four or more"
        )
    best = _best(points, _model(cluster, points))
    return best, median_error(cluster, points, best)


def held_out_errors(cluster: NcclCluster, points: list[SweepPoint]) -> list[float]:
    """Prediction error of each point under a calibration fitted without it."""
    model = _model(cluster, points)
    errors = []
    for place, point in enumerate(points):
        others = [other for other in range(len(points)) if other != place]
        calibration = _best([points[other] for other in others], model[:, others])
        errors.append(
            abs(choose(cluster, "all_reduce", point.bytes, calibration).us / point.us - 1)
        )
    return errors


def median_error(
    cluster: NcclCluster, points: list[SweepPoint], calibration: NcclCalibration
) -> float:
    errors = [
        abs(choose(cluster, "all_reduce", point.bytes, calibration).us / point.us - 1)
        for point in points
    ]
    return float(np.median(errors))


def _model(cluster: NcclCluster, points: list[SweepPoint]) -> np.ndarray:
    """[scales, points]: microseconds before launch and ramp."""
    rows = [
        [
            choose(cluster, "all_reduce", point.bytes, NcclCalibration(scale=float(scale))).us
            for point in points
        ]
        for scale in SCALES
    ]
    return np.array(rows)


def _best(points: list[SweepPoint], model: np.ndarray) -> NcclCalibration:
    size = np.array([point.bytes for point in points], dtype=float)
    measured = np.array([point.us for point in points])
    best, least = UNCALIBRATED, math.inf
    for scale, row in zip(SCALES, model, strict=True):
        launch, ramp = _rest(size, measured, row)
        predicted = row + launch + ramp * np.sqrt(size / (1 << 20))
        loss = float(np.mean(np.abs(predicted / measured - 1)))
        if loss < least:
            best, least = NcclCalibration(launch_us=launch, ramp_us=ramp, scale=float(scale)), loss
    return best


def _rest(size: np.ndarray, measured: np.ndarray, model: np.ndarray) -> tuple[float, float]:
    """Launch and ramp, neither below zero, that explain what the model leaves."""
    columns = np.stack([np.ones_like(size), np.sqrt(size / (1 << 20))], axis=1) / measured[:, None]
    unexplained = 1 - model / measured
    candidates = [(0.0, 0.0)]
    for columns_used in ([0], [1], [0, 1]):
        solution, *_ = np.linalg.lstsq(columns[:, columns_used], unexplained, rcond=None)
        whole = [0.0, 0.0]
        for place, value in zip(columns_used, solution, strict=True):
            whole[place] = float(value)
        if min(whole) >= 0:
            candidates.append((whole[0], whole[1]))
    return min(
        candidates, key=lambda pair: float(np.abs(columns @ np.array(pair) - unexplained).sum())
    )


def _ring_steps(collective: Collective, ranks: int) -> int:
    if collective == "all_reduce":
        return 2 * (ranks - 1)
    return ranks - 1 if collective in ("all_gather", "reduce_scatter") else ranks


def _ring_bus(cluster: NcclCluster, wire: float, protocol: Protocol) -> float:
    fabric = cluster.fabric
    match protocol:
        case "ll":
            return min(_ll_limit(cluster), 0.5 * wire)
        case "ll128":
            return min(0.92 * wire, fabric.channels * fabric.ll128_channel_gb_per_s)
    return wire


def _tree_bus(cluster: NcclCluster, wire: float, protocol: Protocol) -> float:
    fabric, scale = cluster.fabric, min(cluster.nodes, 3) - 1
    bus = min(0.92 * wire, fabric.channels * fabric.tree_channel_gb_per_s[scale])
    match protocol:
        case "ll":
            return min(bus / 3.8, _ll_limit(cluster))
        case "ll128":
            share = 7 / 9 if cluster.nodes == 1 else 120 / 128
            return min(bus * share, fabric.channels * fabric.tree_ll128_channel_gb_per_s[scale])
    return bus


def _nvls_bus(fabric: Fabric) -> float:
    """Each channel is one GPU's share; what a GPU keeps does not cross the switch."""
    channels = fabric.nvls_channels
    return 2 * (channels - 1) * fabric.nvls_channel_gb_per_s * fabric.nvls_share


def _switched(cluster: NcclCluster, collective: Collective, protocol: Protocol) -> bool:
    """NVLS needs a switch that reduces and three GPUs or more."""
    has = cluster.fabric.nvls_channels > 0 and cluster.gpus > 2
    return has and collective == "all_reduce" and protocol == "simple"


def _ll_limit(cluster: NcclCluster) -> float:
    if cluster.nodes == 1:
        return cluster.fabric.ll_gb_per_s
    return NETWORK_LL_GB_PER_S[0 if cluster.nodes == 2 else 1]
