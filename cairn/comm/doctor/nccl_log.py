"""Reads the log that NCCL prints with NCCL_DEBUG=INFO: interface, network, and transport of each channel.

    node1:984:984 [4] NCCL INFO Bootstrap : Using bond0:172.36.134.184<0>
    node1:984:990 [4] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA

Lines of many processes may be mixed. A log in which no line is recognised is refused rather than called healthy.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path

import msgspec

from cairn.comm.doctor.findings import CommFinding
from cairn.core.errors import DataError

LINE = re.compile(
    r"(?P<host>[\w.\-]+):(?P<pid>\d+):\d+ \[(?P<device>-?\d+)\] "
    r"(?:\S+:\d+ )?NCCL (?P<level>INFO|WARN) (?P<text>.*)"
)
USING = re.compile(
    r"(?:Bootstrap ?:|NET/\w+ ?:) ?Using (?:\[\d+\])?"
    r"([\w.\-]+):([\d.]+|\[?[0-9a-f:]+\]?)<\d+>"
)
CHANNEL = re.compile(
    r"Channel (\d+)(?:/\d+)? : (\d+)\[[^\]]*\] -> (\d+)\[[^\]]*\](?: \[(?:send|receive)\])? via (\S+)"
)
RING = re.compile(r"Channel (\d+)/\d+ :((?: +\d+)+)\s*$")
RANK = re.compile(r"\brank (\d+) nranks (\d+)\b")
VIRTUAL = ("lo", "docker", "virbr", "veth", "br-", "cni", "flannel", "cali", "podman")


class NcclLog(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    hosts: dict[int, str]  # of each rank
    ranks: int
    used: dict[str, tuple[str, str]]  # host: interface and address
    network: list[str]  # Socket, IB, a plugin
    ways: dict[tuple[int, int], str]  # from rank to rank: P2P/..., SHM/..., NET/...
    rings: dict[int, list[int]]  # order of ranks, by channel
    warnings: list[str]
    no_devices: bool  # NET/IB found none
    ib_off: bool  # switched off by NCCL_IB_DISABLE


def looks_like(text: str) -> bool:
    return "NCCL INFO" in text or "NCCL WARN" in text


def read_log(path: Path, text: str) -> NcclLog:
    hosts: dict[int, str] = {}
    used: dict[str, tuple[str, str]] = {}
    ways: dict[tuple[int, int], str] = {}
    rings: dict[int, list[int]] = {}
    network, warnings, nccl_lines, ranks = Counter[str](), [], 0, 0
    no_devices = ib_off = False
    for line in text.splitlines():
        header = LINE.search(line)
        if header is None:
            continue
        host, message = header["host"], header["text"]
        nccl_lines += 1
        if header["level"] == "WARN":
            warnings.append(f"{host}: {message}")
        if match := USING.search(message):
            used.setdefault(host, (match[1], match[2]))
        if match := RANK.search(message):
            hosts[int(match[1])], ranks = host, max(ranks, int(match[2]))
        if match := CHANNEL.search(message):
            ways.setdefault((int(match[2]), int(match[3])), match[4])
        elif match := RING.search(message):
            rings.setdefault(int(match[1]), [int(word) for word in match[2].split()])
        if message.startswith("Using network "):
            network[message.removeprefix("Using network ").strip()] += 1
        no_devices |= "NET/IB : No device found" in message
        ib_off |= "NCCL_IB_DISABLE set by environment to 1" in message
    if not nccl_lines:
        raise DataError(
            f"{path} has no line of NCCL", hint="run with NCCL_DEBUG=INFO and give its output"
        )
    return NcclLog(
        source=str(path),
        hosts=hosts,
        ranks=ranks,
        used=used,
        network=list(network),
        ways=ways,
        rings=rings,
        warnings=warnings,
        no_devices=no_devices,
        ib_off=ib_off,
    )


def examine_log(log: NcclLog) -> list[CommFinding]:
    rules = (_interface, _downgrade, _mapping, _failed)
    return [finding for rule in rules for finding in rule(log)]


def _several_hosts(log: NcclLog) -> bool:
    return len(set(log.hosts.values()) | set(log.used)) > 1


def _interface(log: NcclLog) -> list[CommFinding]:
    """Loopback, a bridge of containers, or hosts that chose interfaces of different names."""
    if not _several_hosts(log):
        return []
    bad = {
        host: (name, address)
        for host, (name, address) in log.used.items()
        if name.startswith(VIRTUAL) or address.startswith("127.") or address == "::1"
    }
    if bad:
        lines = [f"{host} uses {name} ({address})" for host, (name, address) in bad.items()]
        return [
            CommFinding(
                cause="wrong interface",
                where=", ".join(sorted(bad)),
                evidence=lines[:8],
                advice="other hosts cannot reach that address: set NCCL_SOCKET_IFNAME and "
                "GLOO_SOCKET_IFNAME to the interface of the cluster network",
            )
        ]
    names = Counter(name for name, _ in log.used.values())
    if len(names) > 1:
        usual = names.most_common(1)[0][0]
        odd = {host: pair for host, pair in log.used.items() if pair[0] != usual}
        networks = {address.rpartition(".")[0] for _, address in log.used.values()}
        if len(networks) > 1:
            lines = [f"{host} uses {name} ({address})" for host, (name, address) in odd.items()]
            return [
                CommFinding(
                    cause="wrong interface",
                    where=", ".join(sorted(odd)),
                    evidence=[*lines[:8], f"the others use {usual}"],
                    advice=f"set NCCL_SOCKET_IFNAME={usual} on every host",
                )
            ]
    return []


def _downgrade(log: NcclLog) -> list[CommFinding]:
    """TCP between hosts, host memory between GPUs of a host, RDMA that does not reach the GPU."""
    ways = Counter(_kind(way) for way in log.ways.values())
    found = []
    if ways["NET/Socket"]:
        lines = [f"{ways['NET/Socket']} connections between ranks go via NET/Socket (TCP)"]
        lines += ["NET/IB : No device found"] * log.no_devices
        lines += ["NCCL_IB_DISABLE=1 in the environment"] * log.ib_off
        advice = (
            "unset NCCL_IB_DISABLE"
            if log.ib_off
            else (
                "make the RDMA devices visible (in containers: /dev/infiniband and --ulimit "
                "memlock=-1), or install the network plugin of the provider"
            )
        )
        found.append(_down("between hosts", lines, advice))
    staged = [way for way in log.ways.values() if _kind(way) == "NET/IB" and "GDR" not in way]
    if staged:
        lines = [
            f"{len(staged)} connections use NET/IB without GDRDMA: bytes pass through the host"
        ]
        found.append(_down("between GPU and NIC", lines, "load nvidia-peermem or enable DMA-BUF"))
    if ways["SHM"] and _same_host_only(log, "SHM"):
        lines = [f"{ways['SHM']} connections within a host go via SHM, none or few via P2P"]
        if ways["P2P"] < ways["SHM"]:
            advice = "check `nvidia-smi topo -m`, NCCL_P2P_DISABLE, and PCIe ACS in the BIOS"
            found.append(_down("within a host", lines, advice))
    return found


def _down(where: str, lines: list[str], advice: str) -> CommFinding:
    return CommFinding(cause="transport downgrade", where=where, evidence=lines, advice=advice)


def _kind(way: str) -> str:
    parts = way.split("/")
    return "/".join(parts[:2]) if parts[0] == "NET" else parts[0]


def _same_host_only(log: NcclLog, kind: str) -> bool:
    pairs = [pair for pair, way in log.ways.items() if _kind(way) == kind]
    return all(log.hosts.get(a) == log.hosts.get(b) for a, b in pairs)


def _mapping(log: NcclLog) -> list[CommFinding]:
    """A ring that leaves hosts more often than there are hosts."""
    hosts = set(log.hosts.values())
    if len(hosts) < 2 or not log.rings:
        return []
    per_host: dict[str, int] = defaultdict(int)
    for host in log.hosts.values():
        per_host[host] += 1
    worst, order = 0, []
    for ring in log.rings.values():
        if not all(rank in log.hosts for rank in ring):
            continue
        around = zip(ring, [*ring[1:], *ring[:1]], strict=True)
        crossings = sum(log.hosts[a] != log.hosts[b] for a, b in around)
        if crossings > worst:
            worst, order = crossings, ring
    if worst <= len(hosts):
        return []
    return [
        CommFinding(
            cause="rank mapping",
            where=f"{len(hosts)} hosts",
            evidence=[
                f"the ring {' '.join(map(str, order[:16]))}{' ..' if len(order) > 16 else ''} leaves a "
                f"host {worst} times; {len(hosts)} would do",
                "ranks of a host: " + "; ".join(_members(log)[:4]),
            ],
            advice="number the ranks host by host (torchrun does; with mpirun use --map-by ppr:N:node "
            "and no --map-by node)",
        )
    ]


def _members(log: NcclLog) -> list[str]:
    rows: dict[str, list[int]] = defaultdict(list)
    for rank, host in sorted(log.hosts.items()):
        rows[host].append(rank)
    return [f"{host} {ranks}" for host, ranks in rows.items()]


def _failed(log: NcclLog) -> list[CommFinding]:
    """Warnings that say a connection broke."""
    broken = [
        line
        for line in log.warnings
        if re.search(
            r"Connection (closed|refused|reset)|timed? ?out|completion .*status", line, re.I
        )
    ]
    if not broken:
        return []
    return [
        CommFinding(
            cause="hang",
            where=broken[0].partition(":")[0],
            evidence=broken[:4],
            advice="the peer named there has died or cannot be reached: its own log says why",
        )
    ]
