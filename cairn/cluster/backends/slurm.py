"""Slurm as an engine: submits the script, and says in plain words what Slurm says in its own.

    sbatch -> squeue -> logs in a folder that all nodes see -> scancel

Needs Slurm's commands on this machine and a home that the nodes see, as Slurm's own users do. Accounting (sacct) is not
needed: how a job ended is written by its script.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator

import msgspec

from cairn.cluster import records
from cairn.cluster.backends.interface import EngineMissing, EngineUnreachable, SubmitFailed
from cairn.cluster.backends.local import tail
from cairn.cluster.backends.slurm_script import script
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.records import ENDED, JobRecord, JobStatus, State
from cairn.cluster.resolve import JobPlan
from cairn.cluster.secret_env import write_private
from cairn.core.errors import CairnError
from cairn.core.rank_failure import failures_in, first_of, report

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol")
PATIENCE_S = 60.0
UNKNOWN_JOB = "Invalid job id"  # what Slurm says of a job that it has forgotten
ANYTHING = ""
SHOWN = 3  # jobs that hold nodes

STATES: dict[str, State] = {
    "PENDING": "queued",
    "CONFIGURING": "starting",
    "RUNNING": "running",
    "COMPLETING": "running",
    "SUSPENDED": "queued",
    "REQUEUED": "restarting",
    "REQUEUE_HOLD": "queued",
    "COMPLETED": "done",
    "CANCELLED": "stopped",
    "PREEMPTED": "restarting",
    "FAILED": "failed",
    "TIMEOUT": "failed",
    "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed",
    "DEADLINE": "failed",
    "BOOT_FAIL": "failed",
}

NEVER = "DependencyNeverSatisfied"
REASONS = {
    "Resources": "waits for nodes that are free at once",
    "Priority": "waits behind jobs of a higher priority",
    "Dependency": "waits for jobs that have to be done before",
    NEVER: "will never start: a job it waits for has failed",
    "BeginTime": "was put back into the queue; Slurm lets it wait before it starts again",
    "QOSMaxJobsPerUserLimit": "waits: the QOS allows no more of this user's jobs",
    "PartitionNodeLimit": "asks for more nodes than the partition allows",
    "PartitionTimeLimit": "asks for more time than the partition allows",
    "PartitionDown": "waits: the partition is down",
    "ReqNodeNotAvail": "waits for nodes that are down or reserved",
    "NodeDown": "waits for nodes that are down",
    "JobHeldUser": "is held by its user: scontrol release",
    "JobHeldAdmin": "is held by an administrator",
    "Nodes_required_for_job_are_DOWN": "waits for nodes that are down",
    "None": "waits for the scheduler's next round",
    "TimeLimit": "reached its time limit",
    "DeadLine": "could not be finished by its deadline",
}


class Slurm:
    """`--on slurm`"""

    name = "slurm"

    def look(self) -> ClusterInventory:
        _check_installed()
        text = _asked(["sinfo", "--noheader", "--Node", "--format=%N|%c|%m|%G|%R|%T"])
        racks = racks_of(_asked(["scontrol", "show", "topology"], ANYTHING))
        return cluster_of(text, racks)

    def unseen(self) -> ClusterInventory:
        return ClusterInventory(engine=self.name, queues=[], checked=False)

    def render(self, plan: JobPlan) -> str:
        return script(plan, "LOGS", [f"JOB_{name}" for name in plan.job.after])

    def submit(self, plan: JobPlan, record: JobRecord) -> JobRecord:
        path = record.folder / "job.sh"
        dependencies = [records.find(name).id for name in plan.job.after]
        containers = _has_containers()
        if not containers and any(group.image for group in plan.groups):
            print("note: this Slurm has no pyxis, so the image is not used", file=sys.stderr)
        python = "python" if containers and plan.groups[0].image else sys.executable
        text = script(plan, str(record.logs), dependencies, python, containers)
        write_private(path, text.encode())  # sbatch reads it as this user
        done = subprocess.run(
            ["sbatch", "--parsable", str(path)], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SubmitFailed(
                f"Slurm refused the job: {done.stderr.strip().removeprefix('sbatch: error: ')}",
                hint=f"the script is {path}; `sinfo` says what there is",
            )
        record = msgspec.structs.replace(record, id=done.stdout.strip().split(";")[0])
        records.save(record)
        return record

    def status(self, record: JobRecord) -> JobStatus:
        if not record.id:  # Slurm refused it, or the launch was killed before it could answer
            last = records.read_status(record)
            never = JobStatus(state="lost", reason="it never got a number from Slurm")
            return last if last.state in ENDED else never
        _check_installed()
        # The name, too: another Slurm has other jobs of the same number.
        which = [f"--jobs={record.id}", f"--name={record.name}"]
        listing = _asked(
            ["squeue", "--noheader", "--states=all", *which, "--format=%T|%r|%D"], UNKNOWN_JOB
        )
        status = status_of(listing) or _remembered(record)
        restarts = int(_field(record.id, "Restarts") or 0) if listing else 0
        if restarts and status.state == "queued" and status.reason == REASONS["None"]:
            status = msgspec.structs.replace(status, reason=REASONS["BeginTime"])
        if status.state == "queued" and status.reason == REASONS["Resources"]:
            reason = status.reason + _holders(record.id)
            status = msgspec.structs.replace(status, reason=reason)
        failure = first_of(failures_in(record.logs)) if status.state == "failed" else None
        last_report = report(failure) if failure is not None else ""
        status = msgspec.structs.replace(status, restarts=restarts, failure=last_report)
        if listing and status.state in ENDED:  # Slurm forgets it in a few minutes
            records.write_status(record, status)
        return status

    def lines(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return tail(record, follow, lambda: self.status(record).state in ENDED)

    def stop(self, record: JobRecord) -> None:
        _asked(["scancel", f"--name={record.name}", record.id])
        ends = time.monotonic() + PATIENCE_S
        while self.status(record).state not in ENDED:
            if time.monotonic() > ends:
                raise CairnError(
                    f"Slurm has not ended job {record.id} within {PATIENCE_S:.0f} s",
                    hint=f"scontrol show job {record.id}",
                )
            time.sleep(0.2)


def _holders(job: str) -> str:
    """The jobs that run in the partition of one that waits, the one with most nodes first."""
    partition = _field(job, "Partition")
    running = ["squeue", "--noheader", "--states=RUNNING,COMPLETING", "--format=%D|%j|%i|%u"]
    listing = _asked([*running, f"--partition={partition}"], ANYTHING) if partition else ""
    rows = [line.split("|", 3) for line in listing.splitlines() if line.count("|") == 3]
    rows.sort(key=lambda row: -int(row[0]))
    held = [f"{nodes} by '{name}' ({number}, {user})" for nodes, name, number, user in rows]
    more = [f"{len(held) - SHOWN} more jobs"] if len(held) > SHOWN else []
    return f"; held now: {', '.join(held[:SHOWN] + more)}" if held else ""


def status_of(listing: str) -> JobStatus | None:
    """Status of a job, or of all tasks of an array, from squeue; None if squeue does not list it."""
    rows = [line.split("|") for line in listing.splitlines() if line.count("|") == 2]
    if not rows:
        return None
    if all(row[:2] == ["CANCELLED", NEVER] for row in rows):
        return JobStatus(state="failed", reason=REASONS[NEVER])
    order: list[State] = [
        "running",
        "restarting",
        "starting",
        "queued",
        "failed",
        "stopped",
        "done",
    ]
    states = [(STATES.get(state, "queued"), state, reason, nodes) for state, reason, nodes in rows]
    state, word, reason, nodes = min(states, key=lambda row: order.index(row[0]))
    count = int(nodes) if state == "running" and nodes.isdigit() else 0
    return JobStatus(state=state, reason=_words(state, word, reason, count), nodes=count)


def _words(state: State, word: str, reason: str, nodes: int) -> str:
    plain = REASONS.get(reason.split(",")[0].strip("()"))
    if state == "running":
        return f"{nodes} nodes"
    if state == "queued":
        return plain or f"waits: {reason}"
    if word == "NODE_FAIL":
        return "a node failed"
    if word in ("TIMEOUT", "DEADLINE"):
        return REASONS["TimeLimit" if word == "TIMEOUT" else "DeadLine"]
    if state == "failed":
        because = "" if reason in ("None", "NonZeroExitCode") else f" ({reason})"
        return f"Slurm says {word.lower()}{because}"
    return "finished" if state == "done" else word.lower()


def cluster_of(text: str, racks: dict[str, str]) -> ClusterInventory:
    nodes: dict[str, ClusterNode] = {}
    queues: set[str] = set()
    for line in text.splitlines():
        name, cpus, mebibytes, gres, partition, _ = line.split("|")
        queues.add(partition)
        gpus, mig = gpus_of(gres)
        nodes[name] = ClusterNode(
            name=name,
            cpus=float(cpus),
            memory=int(mebibytes) << 20,
            gpus=gpus,
            mig=mig,
            domains={"rack": racks[name]} if name in racks else {},
        )
    return ClusterInventory(engine="slurm", nodes=list(nodes.values()), queues=sorted(queues))


def gpus_of(gres: str) -> tuple[int, dict[str, int]]:
    """(8, {}) of gpu:8 or gpu:h200:8(S:0-1); (0, {"1g.10gb": 7}) of gpu:1g.10gb:7."""
    whole, slices = 0, {}
    for kind, count in re.findall(r"gpu(?::([\w.+-]*[A-Za-z][\w.+-]*))?:(\d+)", gres):
        if re.fullmatch(r"\dg\.\d+gb(\.me)?", kind):
            slices[kind] = slices.get(kind, 0) + int(count)
        else:
            whole += int(count)
    return whole, slices


def racks_of(text: str) -> dict[str, str]:
    """Node -> leaf switch, out of `scontrol show topology`."""
    racks: dict[str, str] = {}
    for switch, level, nodes in re.findall(r"SwitchName=(\S+) Level=(\d+).*?Nodes=(\S+)", text):
        if level == "0":
            names = _asked(["scontrol", "show", "hostnames", nodes], ANYTHING).split()
            racks |= dict.fromkeys(names, switch)
    return racks


def _remembered(record: JobRecord) -> JobStatus:
    """Status of a job that Slurm no longer lists: the last status seen, or the one its script wrote."""
    last = records.read_status(record)
    if last.state in ENDED:
        return last
    ended = [path.read_text().strip() for path in record.logs.glob("exit-status-*")]
    if not ended:
        return JobStatus(
            state="lost", reason=f"Slurm has forgotten job {record.id}, and it left no word"
        )
    bad = [status for status in ended if status != "0"]
    if not bad:
        return JobStatus(state="done", reason="finished")
    return JobStatus(state="failed", reason=f"ended with exit status {bad[0]}")


def _field(job: str, name: str) -> str | None:
    listing = _asked(["scontrol", "show", "job", job], UNKNOWN_JOB)
    match = re.search(rf"\b{name}=(\S+)", listing)
    return match[1] if match else None


def _has_containers() -> bool:
    """Return whether srun supports --container-image, which NVIDIA's pyxis adds."""
    return "--container-image" in _asked(["srun", "--help"], ANYTHING)


def _check_installed() -> None:
    missing = [command for command in COMMANDS if shutil.which(command) is None]
    if missing:
        raise EngineMissing(
            f"Slurm is not installed here: no {missing[0]}",
            hint="launch from a login node, or look at the script with --dry-run",
        )
    conf = os.environ.get("SLURM_CONF")
    if conf and not os.path.exists(conf):  # Slurm itself looks for it for a minute
        raise EngineUnreachable(
            f"SLURM_CONF names {conf}, and there is no such file", hint="`scontrol ping` says more"
        )


def _asked(command: list[str], nothing: str | None = None) -> str:
    """Output of a command; "" if it fails with a message that matches `nothing`. A timeout is EngineUnreachable."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        raise EngineUnreachable(
            f"`{command[0]}` got no answer within {PATIENCE_S:.0f} s", hint="is slurmctld running?"
        ) from None
    stderr = done.stderr.strip()
    if done.returncode == 0:
        return done.stdout
    silent = re.search("Unable to contact|Connection refused|configuration source", stderr)
    if nothing is not None and not silent and re.search(nothing, stderr):
        return ""
    raise EngineUnreachable(
        f"`{command[0]}` failed: {stderr.splitlines()[-1] if stderr else done.returncode}",
        hint="is slurmctld running, and is SLURM_CONF the right one? `scontrol ping` says",
    )
