"""A plan as a batch script for Slurm: one allocation is the gang, one agent on each node of it. Pure text.

    #SBATCH ...                  what is asked for; a job of several roles is a heterogeneous job
    srun agent                   on every node, meeting at the first one of its role

A node that fails takes the allocation with it, and Slurm puts the job back into its queue; what it runs then
has a store and a name of its own. Where the script is submitted, and what becomes of it, is for `slurm`.
"""

import datetime
import math
import shlex

import msgspec

from cairn.cluster.backends.slurm_restart import NEVER
from cairn.cluster.elastic import Rendezvous, agent_argv, agent_env, rank_argv
from cairn.cluster.resolve import JobPlan, NodeGroup
from cairn.cluster.spec import Job

# The first, and how many: the number of a job says which; its further roles take the next ones.
PORTS = (20000, 20000)
WAIT_FOR_SWITCH = "10:00"  # how long a preferred nearness is waited for
_SHELL = (
    "$CAIRN_HEAD:$CAIRN_PORT",
    "$CAIRN_IS_HOST",
    "$SLURM_JOB_ID",
    "$CAIRN_ATTEMPT",
)


def script(
    plan: JobPlan,
    logs: str,
    dependencies: list[str],
    python: str = "python",
    containers: bool = True,
) -> str:
    """`logs` is a folder that all nodes see; dependencies are Slurm's numbers of jobs; containers need pyxis."""
    job = plan.job
    head = ["#!/bin/bash", *_directives(job, logs, dependencies)]
    head += [f"#SBATCH --exclude={','.join(plan.avoid)}"] if plan.avoid else []
    for number, group in enumerate(plan.groups):
        head += ["#SBATCH hetjob"] if number else []
        head += _resources(group)
    body = [_BEFORE.format(first=PORTS[0], ports=PORTS[1])]
    many = len(plan.groups) > 1
    for number, group in enumerate(plan.groups):
        group = group if containers else msgspec.structs.replace(group, image=None)
        body.append(_srun(job, group, logs, python, number if many else None))
    body.append(_AFTER.format(logs=shlex.quote(logs), again=_again(job, logs, python)))
    return "\n".join(head) + "\n\n" + "\n".join(body)


_BEFORE = """\
# The first node of a role is where its agents meet; its address, because names need not resolve.
first_address() {{
    scontrol show node "$(scontrol show hostnames "$1" | head -n 1)" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p'
}}
export CAIRN_HEAD=$(first_address "${{SLURM_JOB_NODELIST_HET_GROUP_0:-$SLURM_JOB_NODELIST}}")
export CAIRN_PORT=$(({first} + SLURM_JOB_ID % {ports}))
export CAIRN_ATTEMPT=${{SLURM_RESTART_COUNT:-0}}
submitted=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%V 2>/dev/null | head -n 1)
[ -z "$submitted" ] || export CAIRN_JOB_SUBMITTED=$(date --date="$submitted" +%s)
export CAIRN_JOB_STARTED=$(date +%s)
export CAIRN_ARRAY_INDEX=${{SLURM_ARRAY_TASK_ID:-0}}
"""

# Of a role behind the first.
_MEETING = """\
CAIRN_HEAD=$(first_address "$SLURM_JOB_NODELIST_HET_GROUP_{het}") \\
CAIRN_PORT=$(({first} + (SLURM_JOB_ID + {het}) % {ports})) \\
"""

_AFTER = """\
status=0
for each in $(jobs -p); do wait "$each" || status=$?; done
{again}echo "$status" > {logs}/exit-status-"$SLURM_JOB_ID"
exit "$status"
"""

_AGAIN = """\
if [ "$status" != 0 ] && [ "$CAIRN_ATTEMPT" -lt {most} ]; then
    left_out=$({python} -m cairn.cluster.backends.slurm_restart {run})
    if [ $? != {never} ] && {{ [ -n "$left_out" ] || {always}; }}; then
        trap '' TERM  # Slurm ends this script with the attempt, and one word more has to be said
        scontrol requeue "$SLURM_JOB_ID" || exit "$status"
        for try in 1 2 3 4 5; do
            [ -z "$left_out" ] || scontrol update JobId="$SLURM_JOB_ID" ExcNodeList="$left_out" && break
            sleep 0.5
        done
        exit "$status"
    fi
fi
"""


def _again(job: Job, logs: str, python: str) -> str:
    """A node whose hardware failed is left out, like one that Slurm finds down; other failures are for the policy.

    A mistake of the program would be made again. Where that is unknown (no Cairn on this host), the policy decides.
    """
    if job.restart.policy == "fail":
        return ""
    return _AGAIN.format(
        most=job.restart.max,
        python=shlex.quote(python),
        run=shlex.quote(_run(logs)),
        never=NEVER,
        always="true" if job.restart.policy == "requeue" else "false",
    )


def _run(logs: str) -> str:
    """The folder of the run, in which the logs have theirs."""
    return logs.rpartition("/")[0] or f"{logs}/.."


def _directives(job: Job, logs: str, dependencies: list[str]) -> list[str]:
    options = [
        f"--job-name={job.name}",
        f"--time={slurm_time(job.seconds)}",
        "--requeue" if job.restart.policy != "fail" else "--no-requeue",
        "--open-mode=append",
        f"--output={logs}/batch.log",
    ]
    if job.queue:
        options.append(f"--partition={job.queue}")
    if job.priority:
        options.append(f"--qos={job.priority}")
    if job.deadline is not None:
        utc = job.deadline.astimezone(datetime.UTC)
        options.append(f"--deadline=uts{round(utc.timestamp())}")
    if dependencies:
        options.append(f"--dependency=afterok:{':'.join(dependencies)}")
        options.append("--kill-on-invalid-dep=yes")  # or it would wait for ever
    if job.array.count > 1:
        once = f"%{job.array.parallel}" if job.array.parallel else ""
        options.append(f"--array=0-{job.array.count - 1}{once}")
    if job.topology.required == "rack":
        options.append("--switches=1")
    elif job.topology.preferred in ("rack", "block"):
        options.append(f"--switches=1@{WAIT_FOR_SWITCH}")
    if job.restart.policy == "shrink":
        options.append("--no-kill")
    return [f"#SBATCH {word}" for word in options]


def _resources(group: NodeGroup) -> list[str]:
    nodes = str(group.most) if group.least == group.most else f"{group.least}-{group.most}"
    options = [
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={math.ceil(group.cpus)}",
        f"--mem={math.ceil(group.memory / (1 << 20))}M",
    ]
    if group.gpus:
        kind = f"gpu:{group.mig}" if group.mig else "gpu"
        options.append(f"--gres={kind}:{group.gpus}")
    return [f"#SBATCH {word}" for word in options]


def _srun(job: Job, group: NodeGroup, logs: str, python: str, het: int | None) -> str:
    """srun command that starts one agent on each node of the group in the background, so groups run concurrently."""
    run = _run(logs)
    env = agent_env(job, group, folder=f"{run}/checkpoints", loopback=False)
    env["CAIRN_JOB_FAILURES"] = f"{run}/failures"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    if job.array.count > 1:  # each index keeps its own
        lines.append("export CAIRN_JOB_CHECKPOINTS=$CAIRN_JOB_CHECKPOINTS/$CAIRN_ARRAY_INDEX")
    lines.append(f"export CAIRN_NODE={group.role}-$SLURM_NODEID")
    lines.append("export CAIRN_IS_HOST=$([ $SLURM_NODEID = 0 ] && echo 1 || echo 0)")
    argv = _argv(job, group, python)
    ours = len(argv) - len(group.argv)
    words = [*map(_word, argv[:ours]), *map(shlex.quote, argv[ours:])]
    lines.append("exec " + " ".join(words))
    inner = "\n".join(lines)
    options = [
        f"--het-group={het}" if het is not None else "",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0" if job.restart.policy == "shrink" else "--kill-on-bad-exit=1",
        "--open-mode=append",
        f"--output={shlex.quote(logs)}/{group.role}-{'%a-' if job.array.count > 1 else ''}%n.log",
        f"--container-image={shlex.quote(group.image)}" if group.image else "",
    ]
    meeting = ""
    if het and group.elastic:
        meeting = _MEETING.format(het=het, first=PORTS[0], ports=PORTS[1])
    return f"{meeting}srun {' '.join(filter(None, options))} bash -c {shlex.quote(inner)} &\n"


def _argv(job: Job, group: NodeGroup, python: str) -> list[str]:
    if not group.elastic:
        return rank_argv(group.argv, python)
    rendezvous = Rendezvous(
        endpoint="$CAIRN_HEAD:$CAIRN_PORT",
        run=f"{group.role}-$SLURM_JOB_ID-$CAIRN_ATTEMPT",
        hosted="$CAIRN_IS_HOST",
    )
    return agent_argv(job, group, rendezvous, None, python)


def _word(word: str) -> str:
    """Quote an argument, unless the shell has to expand it."""
    return f'"{word}"' if any(name in word for name in _SHELL) else shlex.quote(word)


def slurm_time(seconds: float) -> str:
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"
