"""This machine as an engine: every node of a job is an agent process here, with a share of the CPUs and GPUs.

    node worker-0 = agent + its ranks        kill the agent, and the node has gone with all its ranks

A fake node is real where it matters: its processes die together, and the others find out over sockets.
"""

import contextlib
import itertools
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil

from cairn.cluster import records, supervisor_process
from cairn.cluster.backends import local_gpus
from cairn.cluster.elastic import Rendezvous, agent_argv, inherited, rank_argv
from cairn.cluster.inventory import ClusterInventory, ClusterNode
from cairn.cluster.leftover_processes import OF_A_RUN, end_leftovers, mark_of
from cairn.cluster.node_reservation import Handle, ReservedNode
from cairn.cluster.orphan_reaper import OrphanReaper
from cairn.cluster.records import JobRecord, JobStatus
from cairn.cluster.resolve import JobPlan
from cairn.cluster.secret_env import write_private
from cairn.core.die_with_parent import die_with_parent

LOOPBACK = "127.0.0.1"


class ProcessNode:
    """A node that is a process."""

    def __init__(self, process: subprocess.Popen[bytes], mark: dict[str, str]) -> None:
        self.process, self.mark = process, mark

    def poll(self) -> int | None:
        """A node has gone when everything on it has."""
        status = self.process.poll()
        if status is not None:
            end_leftovers(self.mark)
        return status

    def end(self, kill: bool = False) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)


class LocalReservation:
    """Nodes out of this machine: processes, and GPUs that no other job from here holds."""

    address = LOOPBACK
    loopback = True

    def __init__(self, record: JobRecord) -> None:
        self.record = record
        self.gpus: dict[int, list[int]] = {}
        self.marks: dict[str, dict[str, str]] = {}
        self.reaper: OrphanReaper | None = None

    def reserve(self, plan: JobPlan) -> str | None:
        each = [group.gpus for group in plan.groups for _ in range(group.most)]
        claimed = local_gpus.claim(self.record, sum(each), _gpus()) if any(each) else []
        if isinstance(claimed, str):
            return claimed
        ends = list(itertools.accumulate(each))
        self.gpus = {
            index: claimed[end - count : end]
            for index, (count, end) in enumerate(zip(each, ends, strict=True))
        }
        return None

    def start(
        self, reserved: ReservedNode, argv: list[str], env: dict[str, str], log: Path
    ) -> Handle:
        if self.reaper is None:
            self.reaper = OrphanReaper({OF_A_RUN: env[OF_A_RUN]})
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus.get(reserved.index, [])))}
        with log.open("ab") as out:
            process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                process_group=0,
                env=inherited({**visible, **env}),
                preexec_fn=die_with_parent,
            )
        self.marks[reserved.name] = mark_of(env)
        return ProcessNode(process, self.marks[reserved.name])

    def release(self) -> None:
        for mark in self.marks.values():
            end_leftovers(mark)
        if self.reaper is not None:
            self.reaper.dismiss()
        local_gpus.release(self.record)


class Local:
    """`--on local`"""

    name = "local"

    def look(self) -> ClusterInventory:
        machine = ClusterNode(
            name=socket.gethostname(),
            gpus=_gpus(),
            cpus=float(len(os.sched_getaffinity(0))),
            memory=psutil.virtual_memory().total,
        )
        return ClusterInventory(engine=self.name, nodes=[machine], shares_nodes=True)

    def unseen(self) -> ClusterInventory:
        return self.look()

    def render(self, plan: JobPlan) -> str:
        return render(plan)

    def submit(self, plan: JobPlan, record: JobRecord) -> JobRecord:
        write_private(record.folder / "plan.json", msgspec.json.encode(plan))
        return supervisor_process.begin(record)

    def status(self, record: JobRecord) -> JobStatus:
        return records.read_status(record)

    def lines(self, record: JobRecord, follow: bool) -> Iterator[str]:
        return tail(record, follow)

    def stop(self, record: JobRecord) -> None:
        supervisor_process.stop(record)


def render(plan: JobPlan) -> str:
    """The command of every node, as one could type it."""
    parts = [f"# {plan.job.name}: {plan.nodes} nodes on this machine"]
    for group in plan.groups:
        rendezvous = Rendezvous(endpoint=f"{LOOPBACK}:PORT", run=f"{plan.job.name}-{group.role}-0")
        argv = (
            agent_argv(plan.job, group, rendezvous, LOOPBACK, "python")
            if group.elastic
            else rank_argv(group.argv, "python")
        )
        nodes = f"{group.role}-0" + (f" .. {group.role}-{group.most - 1}" if group.most > 1 else "")
        parts.append(f"# {nodes}: {group.ranks} ranks, {group.cpus:g} CPUs, {group.gpus} GPUs each")
        parts.append(shlex.join(argv))
    return "\n".join(parts) + "\n"


def tail(
    record: JobRecord, follow: bool, is_over: Callable[[], bool] | None = None
) -> Iterator[str]:
    """All log files together, as they grow; ends when the job has and everything is read."""
    is_over = is_over or (lambda: not records.supervised(record))
    pause = 0.1 if record.supervisor else 1.0  # an engine is not asked all the time
    read: dict[Path, int] = {}
    rest: dict[Path, bytes] = {}
    while True:
        over = not follow or is_over()
        for path in sorted(record.logs.glob("*.log")):
            with path.open("rb") as file:
                file.seek(read.get(path, 0))
                data = rest.get(path, b"") + file.read()
                read[path] = file.tell()
            *whole, rest[path] = data.split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
        if over:
            yield from (line.decode(errors="replace") for line in rest.values() if line)
            return
        time.sleep(pause)


def _gpus() -> int:
    """Asked of NVML, which does not wake CUDA in this process."""
    from cairn.hw.nvml import NvmlMissing, gpus_from_nvml, open_nvml

    try:
        with open_nvml() as nvml:
            return len(gpus_from_nvml(nvml))
    except NvmlMissing:
        return 0
