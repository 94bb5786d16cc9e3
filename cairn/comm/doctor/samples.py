"""Logs as NCCL, its Inspector and nccl-tests write them, made up for a cluster that is not here.

For the self-test: the formats are theirs, the cluster and its fault are ours. Times come from the model of
NCCL, with noise by a seed.
"""

import random

import msgspec

from cairn.comm.nccl_model import NcclCalibration, choose, cluster_of

LAUNCH = NcclCalibration(launch_us=20.0)


def nccl_log(
    hosts: int = 2,
    gpus: int = 4,
    *,
    interface: str = "bond0",
    address: str = "10.1.0",
    between: str = "NET/IB/{rail}/GDRDMA",
    within: str = "P2P/CUMEM",
    network: str = "IB",
    interleaved: bool = False,
    seed: int = 0,
) -> str:
    """The interleaved output of all ranks of a job with NCCL_DEBUG=INFO."""
    dice, ranks = random.Random(seed), hosts * gpus
    host = [r % hosts if interleaved else r // gpus for r in range(ranks)]
    lines = []
    for rank in range(ranks):
        pid, device = 1000 + rank, rank // hosts if interleaved else rank % gpus
        head = f"node{host[rank]}:{pid}:{pid} [{device}] NCCL INFO "
        lines.append(
            [
                f"{head}Bootstrap : Using {interface}:{address}.{host[rank] + 1}<0>",
                *([f"{head}NET/IB : No device found."] if network == "Socket" else []),
                f"{head}Using network {network}",
                f"{head}ncclCommInitRank comm 0x55d0 rank {rank} nranks {ranks} cudaDev {device} "
                f"nvmlDev {device} busId {device + 1}000 commId 0x6af1 - Init START",
            ]
        )
        if rank == 0:
            order = " ".join(str(one) for one in range(ranks))
            lines[-1] += [f"{head}Channel {c:02d}/02 :    {order}" for c in range(2)]
        after = (rank + 1) % ranks
        far = host[after] != host[rank]
        way = between.format(rail=device) if far else within
        side = " [send]" if far else ""
        lines[-1] += [
            f"{head}Channel {c:02d}/0 : {rank}[{device}] -> {after}[{after % gpus}]{side} via {way}"
            for c in range(2)
        ]
    mixed = []
    while any(lines):
        mixed.append(dice.choice([one for one in lines if one]).pop(0))
    return "\n".join(mixed) + "\n"


def inspector(
    communicators: int = 4,
    *,
    late: int | None = None,
    slow: int | None = None,
    sizes: tuple[int, ...] = (64 << 20,),
    each: int = 12,
    seed: int = 0,
) -> str:
    """JSON lines; `late` is a rank of communicator 0 that comes late, `slow` a communicator."""
    dice, ranks = random.Random(seed), 8
    cluster = cluster_of("h200", ranks)
    lines = []
    for group in range(communicators):
        for number in range(each):
            size = sizes[number % len(sizes)]
            us = choose(cluster, "all_reduce", size, LAUNCH).us
            us *= dice.uniform(0.97, 1.06) * (3.0 if group == slow else 1.0)
            waits = us * 4 if group == 0 and late is not None else us * dice.uniform(0, 0.1)
            for rank in range(ranks):
                mine = us if rank == late and group == 0 else us + waits * dice.uniform(0.9, 1.1)
                lines.append(_line(group, rank, ranks, number, size, mine))
    return "\n".join(lines) + "\n"


def _line(group: int, rank: int, ranks: int, number: int, size: int, us: float) -> str:
    algbw = size / (1e3 * us)
    document = {
        "header": {"id": f"0xc{group}", "rank": rank, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "",
            "hostname": f"node{group}",
            "pid": 100 * group + rank,
            "dump_timestamp_us": 1_790_000_000_000_000 + number,
        },
        "coll_perf": {
            "coll": "AllReduce",
            "coll_sn": number + 1,
            "coll_msg_size_bytes": size,
            "coll_exec_time_us": round(us),
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": round(algbw, 6),
            "coll_busbw_gbs": round(algbw * 1.75, 6),
        },
    }
    return msgspec.json.encode(document).decode()


def sweep(*, wrong: int = 0, seed: int = 0) -> str:
    """all_reduce_perf on eight H200."""
    dice, cluster = random.Random(seed), cluster_of("h200", 8)
    lines = [
        "# nccl-tests version 2.19.6",
        "#       size         count      type   redop    root     time   algbw   busbw  #wrong",
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)",
    ]
    for power in range(15, 34):
        size = 1 << power
        us = choose(cluster, "all_reduce", size, LAUNCH).us * dice.uniform(0.97, 1.05)
        rate = size / (1e3 * us)
        bad = wrong if power == 26 else 0
        lines.append(
            f"{size:12d}  {size // 4:12d}  {'float':>8s}  {'sum':>6s}  {-1:6d}  {us:7.2f}  {rate:6.2f}  "
            f"{rate * 1.75:6.2f}  {bad:6d}"
        )
    return "\n".join([*lines, "# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 1"]) + "\n"


def gloo_failure() -> str:
    """The output of a job in which a rank resolved to a loopback address."""
    return (
        "Traceback (most recent call last):\n"
        '  File "/job/train.py", line 31, in main\n'
        "RuntimeError: Gloo connectFullMesh failed with [pair.cc:144] no error, remote=[127.0.0.1]:45001\n"
    )


def timeouts(world: int = 4, missing: int = 2) -> str:
    """The output of torch on ranks that timed out in a collective; the missing rank prints nothing."""
    lines = [f"launching with world_size={world}"]
    lines += [
        f"[rank{rank}]:[E ProcessGroupNCCL.cpp:688] [Rank {rank}] Watchdog caught collective operation "
        f"timeout: WorkNCCL(SeqNum=1241, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) "
        f"ran for 600{rank:03d} milliseconds before timing out."
        for rank in range(world)
        if rank != missing
    ]
    return "\n".join(lines) + "\n"
