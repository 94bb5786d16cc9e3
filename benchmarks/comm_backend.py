"""How fast is the backend "cairn" beside gloo: on one host, and between hosts behind shaped links?

    python benchmarks/comm_backend.py --out benchmarks/cpu/comm.json        (as root, for the namespaces)

One host: all-reduces of both, in turns in the same processes; the ratio of the best and of the median times. Between
hosts: network namespaces (`cairn.comm.bench_rig`), where the wire sets the pace; the time of an all-reduce is from the
first rank's start to the last one's end. Few cores that others use too: only ratios, and shares of the line, mean
anything.
"""

import argparse
import os
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import cairn.labs.torch_backend
from cairn.bench.record import add_arguments, record
from cairn.comm.bench_ranks import run_ranks
from cairn.comm.bench_rig import LinkShape, Rig, why_not
from cairn.labs.torch_backend import Options

KIB, MIB = 1 << 10, 1 << 20
ONE_HOST = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB]
BLOCK = 256


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=100, help="of each small size")
    parser.add_argument("--repeats", type=int, default=9, help="of each size between hosts")
    parser.add_argument("--only", choices=["one_host", "hosts"], help="leave the other out")
    add_arguments(parser)
    options = parser.parse_args()
    results: dict[str, Any] = {"load_average_before": os.getloadavg()[0]}
    if options.only != "hosts":
        results["one_host_2_ranks_all_reduce"] = one_host(options.iterations)
    reason = why_not()
    if options.only != "one_host":
        if reason is not None:
            results["between_hosts"] = f"not measured: {reason}"
        else:
            results |= {
                "line_rate_4_hosts_1_gbit": line_rate(options.repeats),
                "two_level_2_hosts_x_2_ranks_500_mbit": two_level(options.repeats),
                "block_sparse_4_hosts_200_mbit": sparse(max(options.repeats // 2, 3)),
            }
    results["load_average_after"] = os.getloadavg()[0]
    record(results, options)


def one_host(iterations: int) -> list[dict[str, Any]]:
    found = []
    for size, times in run_ranks(2, on_one_host, free_port(), iterations)[0].items():
        best = {name: min(one) for name, one in times.items()}
        middle = {name: statistics.median(one) for name, one in times.items()}
        found.append(
            {"bytes": size}
            | {f"{name}_best_us": round(1e6 * value, 1) for name, value in best.items()}
            | {f"{name}_median_us": round(1e6 * value, 1) for name, value in middle.items()}
            | {
                "best_ratio": round(best["cairn"] / best["gloo"], 3),
                "median_ratio": round(middle["cairn"] / middle["gloo"], 3),
            }
        )
    return found


def on_one_host(
    rank: int, world: int, send_line: Any, port: int, iterations: int
) -> dict[int, dict[str, list[float]]]:
    """By turns, each after a barrier; an iteration takes as long as its slower rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "cairn")}
    found = {}
    for size in ONE_HOST:
        x = torch.ones(size // 4)
        times: dict[str, list[float]] = {name: [] for name in groups}
        for _ in range(iterations if size <= MIB else max(iterations // 10, 8)):
            for name, group in groups.items():
                x.fill_(1)
                dist.barrier()
                began = time.perf_counter()
                dist.all_reduce(x, group=group)
                times[name].append(time.perf_counter() - began)
                assert x[-1] == world
        found[size] = {}
        for name, mine in times.items():
            slower = torch.tensor(mine, dtype=torch.float64)
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            found[size][name] = slower.tolist()
    return found


def line_rate(repeats: int) -> list[dict[str, Any]]:
    found = []
    with Rig(4, LinkShape(mbit=1000)) as rig:
        for size in (8 * MIB, 32 * MIB):
            times = run_ranks(
                4, between_hosts, rig.address(0), 1.0, size, repeats, enter=rig.enter
            )[0]
            least = 2 * 3 / 4 * size * 8 / 1e9
            found.append({"bytes": size, "fewest_s": round(least, 4)} | {
                f"{name}_{kind}": round(least / pick(seconds), 3) for name, seconds in times.items()
                for kind, pick in (("share_of_line_best", min), ("share_of_line_median", statistics.median))
            })  # fmt: skip
    return found


def two_level(repeats: int) -> list[dict[str, Any]]:
    found = []
    with Rig(2, LinkShape(mbit=500)) as rig:
        for place in ([0, 0, 1, 1], [0, 1, 0, 1]):
            times = run_ranks(4, between_hosts, rig.address(0), 0.5, 8 * MIB, repeats,
                              enter=lambda rank, place=place: rig.enter(place[rank]))[0]  # fmt: skip
            found.append({"hosts_of_ranks": place, "bytes": 8 * MIB} | {
                f"{name}_{kind}_ms": round(1e3 * pick(seconds), 1) for name, seconds in times.items()
                for kind, pick in (("best", min), ("median", statistics.median))
            } | {"times_gloo_best": round(min(times["gloo"]) / min(times["cairn"]), 2), "times_gloo_median": round(
                statistics.median(times["gloo"]) / statistics.median(times["cairn"]), 2)})  # fmt: skip
    return found


def sparse(repeats: int) -> list[dict[str, Any]]:
    with Rig(4, LinkShape(mbit=200)) as rig:
        return run_ranks(
            4, sparse_between_hosts, rig.address(0), 8 * MIB, repeats, enter=rig.enter
        )[0]


def join(rank: int, world: int, address: str, gbit: float) -> dict[str, Any]:
    """gloo for the clock, and a group of each."""
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    torch.set_num_threads(1)
    limit = timedelta(seconds=120)
    store = dist.TCPStore(address, 29500, world, rank == 0, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    options = Options(tcp_gbit=gbit)
    cairn_group = dist.new_group(backend="cairn", pg_options=options)
    return {"gloo": dist.new_group(backend="gloo"), "cairn": cairn_group}


def span(run: Any) -> float:
    """Seconds from the first rank's start to the last one's end: one clock, one kernel."""
    dist.barrier()
    began = time.perf_counter()
    run()
    both = torch.tensor([began, -time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(both, dist.ReduceOp.MIN)
    return float(-both[1] - both[0])


def between_hosts(
    rank: int, world: int, send_line: Any, address: str, gbit: float, size: int, repeats: int
) -> dict[str, list[float]]:
    groups = join(rank, world, address, gbit)
    times: dict[str, list[float]] = {name: [] for name in groups}
    for turn in range(repeats + 2):
        for name, group in groups.items():
            x = torch.ones(size // 4)
            seconds = span(lambda x=x, group=group: dist.all_reduce(x, group=group))
            assert (x == world).all()
            if turn >= 2:  # connections find their speed first
                times[name].append(seconds)
    return times


def sparse_between_hosts(
    rank: int, world: int, send_line: Any, address: str, size: int, repeats: int
) -> list[dict[str, Any]]:
    groups = join(rank, world, address, 0.2)
    found = []
    for density in (0.01, 0.05, 0.2, 1.0):
        draw = torch.Generator().manual_seed(rank)
        blocks = torch.randn(size // 4 // BLOCK, BLOCK, generator=draw)
        blocks[torch.rand(len(blocks), generator=draw) >= density] = 0
        times: dict[str, list[float]] = {"gloo": [], "cairn": [], "sparse": []}
        shares: list[float | None] = []
        for _ in range(repeats):
            results = []
            for name in times:
                x = blocks.clone().view(-1)
                group = groups["gloo" if name == "gloo" else "cairn"]

                def run(
                    x: Any = x, name: str = name, group: Any = group, shares: Any = shares
                ) -> None:
                    if name == "sparse":
                        group.sparse_all_reduce(x, BLOCK, 0.6, shares.append).wait()
                    else:
                        dist.all_reduce(x, group=group)

                times[name].append(span(run))
                results.append(x)
            assert torch.allclose(results[0], results[2], atol=1e-4)
        best = {name: min(seconds) for name, seconds in times.items()}
        found.append(
            {
                "block_density": density,
                "share_of_dense_bytes": round(shares[0] or 1.0, 3),
                "dense_gloo_ms": round(1e3 * best["gloo"], 1),
                "dense_cairn_ms": round(1e3 * best["cairn"], 1),
                "sparse_ms": round(1e3 * best["sparse"], 1),
                "times_dense_gloo": round(best["gloo"] / best["sparse"], 2),
                "times_dense_cairn": round(best["cairn"] / best["sparse"], 2),
            }
        )
    return found


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


if __name__ == "__main__":
    assert cairn.labs.torch_backend.NAME == "cairn"
    main()
