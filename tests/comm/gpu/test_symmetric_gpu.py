"""One-shot and two-shot all-reduce on a real GPU: several ranks share one device, for correctness.

Torch lets ranks share a device only when TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1; it says nothing about speed.
"""

import os

import pytest
import torch
import torch.distributed as dist

from cairn.comm.bench_ranks import run_ranks
from cairn.comm.gpu.peer_sum import peer_sum_reference

pytestmark = pytest.mark.gpu
SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


def on_one_gpu(rank, world, tell, port):
    os.environ[SHARE] = "1"
    from cairn.comm.gpu.symmetric import SymmetricAllReduce

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    reduce = SymmetricAllReduce(dist.group.WORLD, device, most_bytes=1 << 18)
    wrong = []
    for call in range(12):  # the halves are used in turn: many calls, other numbers each time
        for dtype in (torch.bfloat16, torch.float32):
            for size in (8, 4097, 60_000):
                every = [
                    torch.randn(size, generator=torch.Generator().manual_seed(97 * call + r)).to(
                        dtype
                    )
                    for r in range(world)
                ]
                x = every[rank].to(device)
                for force in ("one_shot", "two_shot", None):
                    result = reduce(x.clone(), force)
                    if not torch.equal(result.cpu(), peer_sum_reference(every)):
                        wrong.append((call, str(dtype), size, force))
    large = torch.full((1 << 18,), float(rank), device=device)
    total = float(reduce(large)[0])  # too large: the library does it
    torch.cuda.synchronize()
    dist.barrier()
    return wrong, total


@pytest.mark.parametrize("world", [2, 4])
def test_several_ranks_on_one_gpu(world):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for wrong, total in run_ranks(world, on_one_gpu, port, start="spawn", timeout_s=300):
        assert wrong == []
        assert total == world * (world - 1) / 2
