"""A rank of the elastic tests: meets the others over gloo, and goes on until the file `finish` is there.

python elastic_worker.py FOLDER      FOLDER/met-PID.json: its group has met; FOLDER/fail-RANK: it fails
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = torch.ones(())
    dist.all_reduce(everyone)
    about = {
        "rank": rank,
        "world": world,
        "met": int(everyone),
        "pid": os.getpid(),
        "agent": os.getppid(),
        "node": os.environ.get("CAIRN_NODE"),
        "host": os.environ.get("SLURMD_NODENAME"),
        "head": os.environ.get("CAIRN_HEAD"),
        "attempt": os.environ.get("CAIRN_JOB_ATTEMPT"),
        "master": os.environ["MASTER_PORT"],
    }
    fresh = folder / f".met-{os.getpid()}"
    fresh.write_text(json.dumps(about))
    fresh.replace(folder / f"met-{os.getpid()}.json")
    print(f"met {int(everyone)} of {world}", flush=True)
    while True:
        if (folder / f"fail-{rank}").exists():
            raise RuntimeError(f"rank {rank} was told to fail")
        done = torch.tensor(float((folder / "finish").exists()))
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done:
            break
        time.sleep(0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
