"""The nodes that jobs from here leave out, and how they got there: STATE/cordons.json.

    what ranks wrote about their ends, in the logs of the jobs --learned--> strikes, cordons --avoid--> Plan.avoid
    a person: `cairn jobs nodes --cordon NODE`, `--lift NODE`               Slurm: --exclude; Ray: not on that node

Which end is laid to a node is policy (`failure`): hardware at once, three hangs or lost connections within a day. The
same end is counted once, however often the logs are read. On Kubernetes the list is the cluster's own (kubectl cordon).
"""

import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from cairn.cluster import records
from cairn.cluster.inventory import ClusterInventory
from cairn.cluster.resolve import JobPlan
from cairn.core.cordon import DAY_S, Cordons, load, save
from cairn.core.rank_failure import RankFailure, failures_in
from cairn.core.restart_policy import POLICIES

FILE = "cordons.json"


def path() -> Path:
    return records.state_folder() / FILE


def current(now: float | None = None) -> Cordons:
    """The list, with what the jobs of this machine have been through since it was written."""
    stored = load(path())
    cordons = learned(
        stored,
        (f for job in records.latest() for f in failures_in(job.logs) if job.engine != "local"),
        time.time() if now is None else now,
    )
    if cordons != stored:
        save(path(), cordons)
    return cordons


def learned(cordons: Cordons, failures: Iterable[RankFailure], now: float) -> Cordons:
    """Add every failure that is attributed to a node and was not counted yet. Pure."""
    for failure in sorted(failures, key=lambda failure: failure.at):
        if not failure.is_own or now - failure.at > DAY_S or _counted(cordons, failure):
            continue
        policy, why = POLICIES[failure.verdict.cause], failure.verdict.why
        if policy.strike:
            cordons = cordons.strike(failure.blamed, failure.at, why)
        if policy.cordon:
            cordons = cordons.cordon(failure.blamed, failure.at, why, DAY_S)
    return cordons


def _counted(cordons: Cordons, failure: RankFailure) -> bool:
    """Or forgiven: it was before the cordon was lifted."""
    if failure.at <= cordons.lifted.get(failure.blamed, 0.0):
        return True
    return any(s.node == failure.blamed and s.at == failure.at for s in cordons.strikes)


def avoid(
    cluster: ClusterInventory, cordons: Cordons, now: float
) -> tuple[ClusterInventory, list[str], list[str]]:
    """The cluster without those nodes, their names, and what to say about it. Pure.

    Never all of them: a machine with one node is used however often it has failed.
    """
    out = cordons.excluded(now)
    names = {node.name for node in cluster.nodes}
    bad = sorted(names & out.keys())
    if not bad or cluster.engine == "local":
        return cluster, [], []
    if names == set(bad):
        return (
            cluster,
            [],
            [f"every node is on the cordon list ({', '.join(bad)}); used all the same"],
        )
    left = msgspec.structs.replace(cluster, nodes=[n for n in cluster.nodes if n.name not in out])
    notes = [f"node {name} is left out: {out[name]} (cairn jobs nodes)" for name in bad]
    return left, bad, notes


def planned(plan: JobPlan, bad: list[str], notes: list[str]) -> JobPlan:
    return msgspec.structs.replace(plan, avoid=bad, notes=[*plan.notes, *notes])
