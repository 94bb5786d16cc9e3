"""Arguments and environment that start the ranks of a job through torch elastic. Pure; starts nothing.

    store (one process that is no rank) <-- agent of node 0 (torchrun) --> rank 0, 1     each wrapped by `cluster.rank`
                                        <-- agent of node 1 (torchrun) --> rank 2, 3

What torchrun does by default and what is done here instead (docs/cluster.md has the measurements):

- it hands one store to all attempts, so new ranks read addresses of dead ones and never meet: a fresh one for each;
- it takes 45 s to believe that a node has gone: heartbeats of the job's own (1 s, three missed);
- the node that hosts the store cannot be lost: the store is a process of its own, beside the supervisor;
- workers outlive a killed agent: each rank asks the kernel to die with its parent.
"""

import os
import sys
from collections.abc import Sequence

import msgspec

from cairn.cluster.resolve import NodeGroup
from cairn.cluster.spec import Job
from cairn.core.units import parse_duration

# Runs until its standard input ends, that is, until its parent has ended.
STORE_PROGRAM = """
import sys
from torch.distributed import TCPStore
store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
JOIN_S = 600  # how long an agent waits for the others before it gives up


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Rendezvous of the agents of one attempt."""

    endpoint: str  # host:port, may hold $VARIABLES of a shell
    run: str  # differs from attempt to attempt
    # Whether the agent hosts the store itself; empty: the one whose address it is.
    hosted: str = "0"


def store_argv(host: str, port: int = 0, python: str = sys.executable) -> list[str]:
    return [python, "-c", STORE_PROGRAM, host, str(port)]


def agent_argv(
    job: Job,
    group: NodeGroup,
    rendezvous: Rendezvous,
    local_address: str | None = None,
    python: str = sys.executable,
) -> list[str]:
    """Command of an agent, equal on every node of the group."""
    health = max(1, round(parse_duration(job.health.heartbeat)))
    last_call = max(1, round(parse_duration(job.elastic.last_call)))
    settings = {
        **({"is_host": rendezvous.hosted} if rendezvous.hosted else {}),
        "join_timeout": JOIN_S,
        "last_call_timeout": last_call,
        "keep_alive_interval": health,
        "keep_alive_max_attempt": job.health.missed,
    }
    restarts = 0 if job.restart.policy == "fail" else job.restart.max
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={group.least}:{group.most}",
        f"--nproc-per-node={group.ranks}",
        f"--max-restarts={restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={rendezvous.endpoint}",
        f"--rdzv-id={rendezvous.run}",
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in settings.items()),
        *([f"--local-addr={local_address}"] if local_address else []),
        f"--shutdown-timeout={max(1, round(parse_duration(job.restart.grace)))}",
        "--no-python",
        *rank_argv([_literal(word) for word in group.argv], python),
    ]


def _literal(word: str) -> str:
    """torchrun fills in $local_rank, and makes one $ of two; the job's own words are meant as they stand."""
    return word.replace("$", "$$")


def rank_argv(argv: Sequence[str], python: str = sys.executable) -> list[str]:
    return [python, "-m", "cairn.cluster.rank", "--", *argv]


def agent_env(job: Job, group: NodeGroup, *, folder: str | None, loopback: bool) -> dict[str, str]:
    """Environment of an agent and its ranks in addition to the job's variables."""
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_ENABLE_FILE_TIMER": "0",
        "CAIRN_JOB": job.name,
        "CAIRN_JOB_ROLE": group.role,
        "CAIRN_JOB_ENV": " ".join(group.env),
        "CAIRN_JOB_GRACE": f"{parse_duration(job.restart.grace):g}",
        "PYTHONUNBUFFERED": "1",
    }
    if job.health.check != "warn":
        env["CAIRN_JOB_HEALTH"] = job.health.check
    if not group.gpus:
        env["OMP_NUM_THREADS"] = str(max(1, int(group.cpus) // group.ranks))
    if folder or job.checkpoint.folder:
        env["CAIRN_JOB_CHECKPOINTS"] = job.checkpoint.folder or folder or ""
    if loopback:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return {**env, **recovery_env(job, group), **group.env}


def recovery_env(job: Job, group: NodeGroup) -> dict[str, str]:
    """Environment that sets the recipe's [recovery] of `cairn train` from the job's failure settings.

    Ranks of an elastic role are started anew by their agents, and read their state from the memory of the nodes that
    are left; a `direct` role looks after ranks of its own.
    """
    if group.argv[:2] != ["cairn", "train"]:
        return {}
    if job.restart.policy == "fail" or "memory" not in job.checkpoint.tiers:
        return {}
    heartbeat = parse_duration(job.health.heartbeat)
    settings = {
        "ON": "true",
        "RESTARTS": str(job.restart.max),
        "SILENT_S": f"{heartbeat * job.health.missed:g}",
        "STUCK_S": f"{parse_duration(job.health.hang):g}",
        "INTERVAL": "true" if job.checkpoint.interval == "auto" else "false",
    }
    if job.health.slow != "tell":
        settings["SLOW_ACTION"] = job.health.slow
    if job.health.straggler > 1:
        settings["SLOW_FACTOR"] = f"{job.health.straggler:g}"
    if "object" in job.checkpoint.tiers:
        settings["OBJECT_STORE"] = job.checkpoint.object_store
    return {f"CAIRN_TRAIN_RECOVERY__{name}": value for name, value in settings.items()}


def inherited(env: dict[str, str]) -> dict[str, str]:
    """The environment of a process here: ours, without the rank that we may be ourselves."""
    ours = {name: value for name, value in os.environ.items() if name not in _OF_A_RANK}
    return {**ours, **env}


_OF_A_RANK = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
