"""Real hosts in one kernel: the backend between network namespaces with the rate of a link."""

import datetime
import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

import cairn.labs.torch_backend
from cairn.comm.bench_ranks import BenchRankFailed, run_ranks
from cairn.comm.bench_rig import LinkShape, Rig, why_no_delay, why_not
from cairn.core.errors import HardwareError
from cairn.labs.torch_backend import Options

REASON = why_not()
NO_DELAY = why_no_delay() if REASON is None else REASON
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no network namespaces: {REASON}")
MBIT = 400


def join(rank, world, address):
    store = dist.TCPStore(address, 29500, world, rank == 0, timeout=datetime.timedelta(seconds=60))
    options = Options(tcp_gbit=MBIT / 1000)
    dist.init_process_group("cairn", store=store, rank=rank, world_size=world, pg_options=options)


def sums(rank, world, tell, address, size):
    join(rank, world, address)
    hosts = dist.group.WORLD.collectives.places.hosts
    began = time.monotonic()
    for value in range(3):
        x = torch.full((size,), float(rank + value))
        dist.all_reduce(x)
        assert (x == world * value + world * (world - 1) / 2).all()
    seconds = (time.monotonic() - began) / 3
    y = torch.full((1000,), float(rank))
    works = [dist.isend(y, (rank + 1) % world), dist.irecv(torch.empty(1000), (rank - 1) % world)]
    for work in works:
        work.wait()
    dist.barrier()
    return hosts, seconds


@pytest.mark.parametrize("place", [[0, 1, 2], [0, 0, 1, 1], [0, 1, 0, 1]])
def test_between_namespaces(place):
    """They are seen as hosts, in their order, and nothing is faster than the wire."""
    size = 500_000
    with Rig(max(place) + 1, LinkShape(mbit=MBIT)) as rig:
        found = run_ranks(
            len(place),
            sums,
            rig.address(0),
            size,
            enter=lambda rank: rig.enter(place[rank]),
            timeout_s=100,
        )
    assert all(hosts == tuple(sorted(place)) for hosts, _ in found)
    # Each host must hear the sum of the others at least: 4 bytes for each element, less what the bucket holds.
    assert min(seconds for _, seconds in found) > 0.5 * 4 * size * 8 / (MBIT * 1e6)


def round_trips(rank, world, tell, address):
    join(rank, world, address)
    dist.barrier()
    began = time.monotonic()
    for _ in range(5):
        dist.barrier()
    return (time.monotonic() - began) / 5


@pytest.mark.skipif(NO_DELAY is not None, reason=f"no latency: {NO_DELAY}")
def test_latency_between_namespaces():
    """No barrier is sooner than a packet from the other host."""
    with Rig(2, LinkShape(mbit=MBIT, delay_ms=20.0)) as rig:
        found = run_ranks(2, round_trips, rig.address(0), enter=rig.enter, timeout_s=100)
    assert min(found) > 0.019


@pytest.mark.skipif(NO_DELAY is None, reason="this kernel has netem")
def test_latency_that_the_kernel_cannot_have_is_refused():
    with (
        pytest.raises(HardwareError, match="no latency between namespaces"),
        Rig(2, LinkShape(delay_ms=5.0)),
    ):
        pass


def dies(rank, world, tell, address):
    join(rank, world, address)
    dist.barrier()
    if rank == 1:
        os._exit(9)
    while True:
        dist.all_reduce(torch.ones(100_000))


def test_a_host_that_goes():
    with (
        Rig(3, LinkShape(mbit=MBIT)) as rig,
        pytest.raises((BenchRankFailed, cairn.labs.torch_backend.CommError), match="rank 1"),
    ):
        run_ranks(3, dies, rig.address(0), enter=rig.enter, timeout_s=60)


def test_nothing_is_left_behind():
    """Also when whoever built it is killed: the namespaces end with their processes."""
    code = (
        "import os, signal\n"
        "from cairn.comm.bench_rig import Rig\n"
        "rig = Rig(2).__enter__()\n"
        "print(*[holder.pid for holder in rig._holders], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
