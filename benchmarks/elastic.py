"""How long until the ranks of a job meet again: after kill -9 of a rank, after the loss of a node, after it came back?

    python benchmarks/elastic.py --out benchmarks/cpu/elastic.json

Two nodes with one gloo rank each, launched as `cairn launch --on local` does. Beside the times stands what is
in them and cannot be helped: one `import torch` in a fresh process on the same machine at that time.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from cairn.bench.record import add_arguments, record
from cairn.cluster import records, supervisor_process
from cairn.cluster.backends.local import Local
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Elastic, Job, Restart, Role

RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
one = torch.ones(()); dist.all_reduce(one)
with open(os.path.join(sys.argv[1], f"met-{os.getpid()}.tmp"), "w") as out:
    json.dump({"world": int(one), "pid": os.getpid(), "at": time.time(), "rank": dist.get_rank()}, out)
os.rename(out.name, out.name[:-4] + ".json")
while not os.path.exists(os.path.join(sys.argv[1], "finish")):
    time.sleep(0.05); dist.all_reduce(one)
"""
REGROW_S = 10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CAIRN_JOBS"] = f"{folder}/jobs"
        results = measure(Path(folder))
    record(results, options)


def measure(folder: Path) -> dict[str, Any]:
    role = Role(
        argv=[sys.executable, "-c", RANK, str(folder)], nodes=(1, 2), cpus=0.1, memory="64MiB"
    )
    elastic = Elastic(last_call="1s", regrow_after=f"{REGROW_S}s")
    job = Job(
        name="bench", roles=[role], elastic=elastic, restart=Restart(policy="shrink", grace="1s")
    )
    engine = Local()
    launched = time.time()
    running = engine.submit(resolve(job, engine.look()), records.create(job, "local"))
    try:
        first = met(folder, 2, set())
        results = {
            "load_average_before": os.getloadavg()[0],
            "import_torch_s": import_time(),
            "first_meeting_s": round(last(first) - launched, 2),
        }
        killed = kill(first[1]["pid"])
        second = met(folder, 2, pids(first))
        results["rank_killed_s"] = round(last(second) - killed, 2)
        killed = kill(agent(second[0]["pid"]))
        third = met(folder, 1, pids(first + second))
        results["node_lost_s"] = round(last(third) - killed, 2)
        fourth = met(folder, 2, pids(first + second + third))
        results["node_back_s"] = round(last(fourth) - killed - REGROW_S, 2)
        return results
    finally:
        supervisor_process.stop(running)


def met(folder: Path, world: int, seen: set[int]) -> list[dict[str, Any]]:
    while True:
        found = [json.loads(path.read_text()) for path in folder.glob("met-*.json")]
        fresh = [rank for rank in found if rank["pid"] not in seen and rank["world"] == world]
        if len(fresh) == world:
            return sorted(fresh, key=lambda rank: rank["rank"])
        time.sleep(0.02)


def kill(pid: int) -> float:
    os.kill(pid, signal.SIGKILL)
    return time.time()


def agent(pid: int) -> int:
    """program <- rank's wrapper <- agent"""
    return psutil.Process(psutil.Process(pid).ppid()).ppid()


def last(ranks: list[dict[str, Any]]) -> float:
    return max(rank["at"] for rank in ranks)


def pids(ranks: list[dict[str, Any]]) -> set[int]:
    return {rank["pid"] for rank in ranks}


def import_time() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
