"""Arguments and environment of the node processes that a supervisor starts. Pure.

    Run (this job, this attempt, where to meet)  +  ReservedNode (which node)   -->   argv_of, env_of

How torch elastic gets all that is in `elastic`; which engine starts it, in `node_reservation`.
"""

from pathlib import Path

import msgspec

from cairn.cluster.elastic import Rendezvous, agent_argv, agent_env, rank_argv
from cairn.cluster.node_reservation import ReservedNode
from cairn.cluster.records import JobRecord
from cairn.cluster.spec import Job


class JobAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt of a job; its nodes never join the rendezvous of another attempt."""

    job: Job
    record: JobRecord
    attempt: int
    address: str  # of the supervisor, as nodes see it
    port: int  # of the store
    store: bool  # the supervisor has started one; otherwise the only agent hosts it
    loopback: bool  # all nodes are on this machine
    failures: Path  # where nodes that share this disk write


def argv_of(run: JobAttempt, reserved: ReservedNode) -> list[str]:
    if not reserved.group.elastic:
        return rank_argv(reserved.group.argv)
    rendezvous = Rendezvous(
        endpoint=f"{run.address}:{run.port}",
        run=f"{run.job.name}-{reserved.group.role}-{run.attempt}",
        hosted="0" if run.store else "1",
    )
    return agent_argv(run.job, reserved.group, rendezvous, run.address if run.loopback else None)


def env_of(run: JobAttempt, reserved: ReservedNode, now: float) -> dict[str, str]:
    """`now`: seconds since 1970, for the ledger of the job's time."""
    group, restart = reserved.group, run.job.restart
    folder = str(run.record.folder / "checkpoints")
    env = agent_env(run.job, group, folder=folder, loopback=run.loopback)
    env |= {"CAIRN_NODE": reserved.name, "CAIRN_ATTEMPT": str(run.attempt)}
    env["CAIRN_JOB_FAILURES"] = str(run.failures)
    env["CAIRN_JOB_STARTED"] = f"{now:.3f}"
    env["CAIRN_JOB_SUBMITTED"] = f"{run.record.created:.3f}"
    if restart.policy != "fail" and group.elastic:
        env["CAIRN_JOB_REPLACES"] = restart.policy  # a node that leaves is made up for
        env["CAIRN_JOB_LEAST"] = str(group.least * group.ranks)
    return env
