"""Network ports of this machine and their link speeds.

Reads /sys/class/net and /sys/class/infiniband below a given root. The speed is the link's own
claim: what a collective reaches over it is for `cairn comm bench` to say. The loopback interface
is left out.
"""

import re
from pathlib import Path

from cairn.hw.machine import FabricPort, Nic
from cairn.hw.sysfs import read_int, read_node, read_text


def read_nics(root: Path) -> list[Nic]:
    folders = sorted(_entries(root / "sys/class/net"))
    return [_nic(folder) for folder in folders if folder.name != "lo"]


def read_fabrics(root: Path) -> list[FabricPort]:
    """Every port that speaks verbs: InfiniBand, or RoCE where the link layer is Ethernet."""
    ports = (root / "sys/class/infiniband").glob("*/ports/[0-9]*")
    return [_fabric_port(folder) for folder in sorted(ports)]


def _nic(folder: Path) -> Nic:
    state = read_text(folder / "operstate")
    speed = read_int(
        folder / "speed"
    )  # in Mbit/s; -1 or no answer when the link is down or virtual
    driver = folder / "device/driver"
    return Nic(
        name=folder.name,
        up=None if state in (None, "unknown") else state == "up",
        speed_bits_per_s=speed * 1_000_000 if speed is not None and speed > 0 else None,
        mtu=read_int(folder / "mtu"),
        driver=driver.resolve().name if driver.exists() else None,
        numa_node=read_node(folder / "device/numa_node"),
    )


def _fabric_port(folder: Path) -> FabricPort:
    device = folder.parent.parent
    state = read_text(folder / "state")  # "4: ACTIVE"
    rate = re.match(r"([\d.]+) Gb/sec", read_text(folder / "rate") or "")  # "400 Gb/sec (4X NDR)"
    return FabricPort(
        device=device.name,
        port=int(folder.name),
        link_layer=read_text(folder / "link_layer"),
        active=None if state is None else "ACTIVE" in state,
        rate_bits_per_s=int(float(rate[1]) * 1e9) if rate else None,
        numa_node=read_node(device / "device/numa_node"),
    )


def _entries(folder: Path) -> list[Path]:
    # "bonding_masters" lies among the interfaces and is a plain file.
    return [entry for entry in folder.iterdir() if entry.is_dir()] if folder.is_dir() else []
