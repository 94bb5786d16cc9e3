"""Which way the bytes take, for every kind of machine."""

import pytest

from cairn.hw.checks_host import check_transfer
from cairn.hw.evidence import HardwareEvidence
from cairn.hw.machine import FabricPort, Gpu, Machine
from cairn.hw.transfer_path import transfer_paths

PORT = FabricPort(device="mlx5_0", port=1, active=True, rate_bits_per_s=400_000_000_000)
DOWN = FabricPort(device="mlx5_1", port=1, active=False)
GPU = Gpu(index=0, name="H200", source="nvml")


@pytest.mark.parametrize(
    ("gpus", "ports", "nixl", "peer_memory", "way", "better"),
    [
        ([], [], None, False, "TCP", None),
        ([GPU], [], "1.5.1", True, "TCP, staged", None),
        ([GPU], [DOWN], "1.5.1", True, "TCP, staged", None),
        ([GPU], [PORT], None, True, "TCP, staged", "pip install nixl"),
        ([], [PORT], "1.5.1", False, "RDMA", None),
        ([GPU], [PORT], "1.5.1", False, "RDMA", "sudo modprobe nvidia_peermem"),
        ([GPU], [PORT], "1.5.1", True, "GPUDirect", None),
    ],
)
def test_the_way_to_other_machines(gpus, ports, nixl, peer_memory, way, better):
    machine = Machine(gpus=gpus, fabrics=ports)
    paths = transfer_paths(machine, nixl, peer_memory)
    assert (paths.within, paths.between, paths.better) == ("shared memory", way, better)
    evidence = HardwareEvidence(
        machine=machine, own_pid=1, is_root=False, nixl=nixl, peer_memory=peer_memory
    )
    finding = check_transfer(evidence)
    assert finding.status == ("ok" if better is None else "warn")
    assert f"between machines {way} (" in finding.why
    if PORT in ports:
        assert "mlx5_0 (400 Gbit/s)" in finding.why
