"""Launches jobs on this machine for the tests, watches their ranks, and makes sure that nothing is left of them."""

import json
import os
import sys
import time
from pathlib import Path

import psutil

from cairn.cluster import records
from cairn.cluster.backends.interface import Backend
from cairn.cluster.backends.local import Local
from cairn.cluster.resolve import resolve
from cairn.cluster.spec import Elastic, Job, Restart, Role

WORKER = Path(__file__).with_name("elastic_worker.py")
PATIENCE_S = 300.0  # of a machine that does other things, too


def elastic_job(name, folder, nodes, **parts):
    role = Role(
        argv=[sys.executable, str(WORKER), str(folder)], nodes=nodes, cpus=0.1, memory="64MiB"
    )
    parts.setdefault(
        "restart", Restart(policy="shrink" if isinstance(nodes, tuple) else "in_place", grace="1s")
    )
    parts.setdefault("elastic", Elastic(last_call="1s"))
    return Job(name=name, roles=[role], time_limit="5m", **parts)


def launch(job: Job, engine: Backend | None = None):
    engine = engine or Local()
    plan = resolve(job, engine.look())
    record = records.create(job, engine.name, address=getattr(engine, "address", ""))
    return engine.submit(plan, record)


def until(condition, what):
    ends = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not within {PATIENCE_S:.0f} s: {what}")


def met(folder: Path, world: int, ignore=(), alive=True):
    """The ranks of a group of this size that has met (and lives); `ignore`: pids of earlier ones."""

    def found():
        ranks = [json.loads(path.read_text()) for path in folder.glob("met-*.json")]
        fresh = [r for r in ranks if r["pid"] not in ignore]
        fresh = [r for r in fresh if psutil.pid_exists(r["pid"]) or not alive]
        for master in {r["master"] for r in fresh}:
            group = [r for r in fresh if r["master"] == master]
            if len(group) == world and all(r["world"] == world for r in group):
                return sorted(group, key=lambda r: r["rank"])
        return None

    return until(found, f"{world} ranks have met in {folder}")


def agent_of(rank) -> int:
    """rank <- wrapper <- agent"""
    return psutil.Process(psutil.Process(rank["pid"]).ppid()).ppid()


def ended(record, engine: Backend | None = None):
    engine = engine or Local()

    def over():
        status = engine.status(record)
        return status if status.state in records.ENDED else None

    return until(over, f"job {record.name} ends")


def has_ended(pid: int) -> bool:
    """Also where nobody has asked yet how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def nothing_left(folder: Path, patience_s: float = 20.0) -> bool:
    """No process of this machine has the folder in its command line; those that just end get their time for it."""
    deadline = time.monotonic() + patience_s
    while left(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def left(folder: Path):
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if str(folder) in words and process.pid != os.getpid() and "pytest" not in words:
            found.append(words)
    return found
