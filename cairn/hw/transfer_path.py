"""Transports from this machine's memory to another machine's, and to another process of this machine.

    GPUDirect      a fabric's port reads GPU memory itself
    RDMA           a fabric's port reads host memory; a GPU's pages are staged there
    shared memory  processes of one machine: one copy
    TCP, staged    everything else: out of the GPU, through the kernel, into the other GPU

Pure: over what was probed. Whether it is fast is for `cairn bench comm --transfer` to say.
"""

from typing import Literal

import msgspec

from cairn.hw.machine import FabricPort, Machine

Way = Literal["GPUDirect", "RDMA", "shared memory", "TCP, staged", "TCP"]


class TransferPaths(msgspec.Struct, frozen=True, kw_only=True):
    within: Way  # between processes of this machine
    between: Way  # to other machines
    why: str  # of `between`
    better: str | None = None  # what would give a better one, if anything here could


def transfer_paths(machine: Machine, nixl: str | None, peer_memory: bool) -> TransferPaths:
    """`nixl`: its version, or None; `peer_memory`: the driver lets network ports reach GPU memory."""
    ports = [port for port in machine.fabrics if port.active]
    names = ", ".join(_words(port) for port in ports)
    plain: Way = "TCP, staged" if machine.gpus else "TCP"
    if not ports:
        why = "no active InfiniBand or RoCE port"
        return TransferPaths(within="shared memory", between=plain, why=why)
    if nixl is None:
        why = f"{names} could do RDMA, but NIXL is not installed"
        return TransferPaths(
            within="shared memory", between=plain, why=why, better="pip install nixl"
        )
    if not machine.gpus:
        return TransferPaths(
            within="shared memory", between="RDMA", why=f"NIXL {nixl} over {names}"
        )
    if not peer_memory:
        why = f"NIXL {nixl} over {names}, but nvidia_peermem is not loaded"
        return TransferPaths(
            within="shared memory", between="RDMA", why=why, better="sudo modprobe nvidia_peermem"
        )
    why = f"NIXL {nixl} over {names}"
    return TransferPaths(within="shared memory", between="GPUDirect", why=why)


def _words(port: FabricPort) -> str:
    rate = f" ({port.rate_bits_per_s / 1e9:g} Gbit/s)" if port.rate_bits_per_s else ""
    return f"{port.device}{rate}"
