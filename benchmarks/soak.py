"""Breaks small runs of two to four ranks again and again, and counts the promises that were not kept.

    python benchmarks/soak.py [--kills 50] [--terms 20] [--full 10] [--corrupt 10] [--seed 0] [--out soak.json]

    kill      SIGKILL to a rank or to the parent; half of them with recovery, which goes on by itself
    term      SIGTERM, Ctrl-C or a hangup to the parent, or SIGTERM to the whole process group
    full      the file system of the run has no room for a while (needs the right to mount a tmpfs)
    corrupt   the newest checkpoint is damaged before the run is started again

After each fault the same command goes on to the last step. Promises: no complete checkpoint fails to load, no more
steps are lost than the interval between two checkpoints (none after a signal), no process is left, and the losses are
those of an unbroken run, to the bit. Not part of the test suite: it takes minutes.

Rounds are drawn one by one from the seed and their number, and `--out` is written after each of them: the same
command goes on where an earlier one was ended. Where `py-spy` is installed, the stacks of a run that hangs are printed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import psutil
import torch

from cairn.core.job_ledger_files import read_ledger
from cairn.train.checkpoint import folder as folders
from cairn.train.checkpoint.export import export_checkpoint
from cairn.train.config import Checkpoint, Data, Log, Model, Optim, Schedule, Train
from cairn.train.launch import run_local
from cairn.train.metrics_log import read_log
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.local_driver import run_on_nodes
from cairn.train.recovery.settings import Recovery
from cairn.train.run import run

STEPS, EVERY, MEMORY_EVERY = 24, 6, 3
STEP_S = 0.02  # so that a fault meets a step, not the end of the run
MODEL = Model(
    preset="tiny-qwen3", layers=2, hidden=32, heads=2, kv_heads=2, intermediate=48, vocab=64
)
INTERRUPTED = 10


def recipe(folder: Path, world: int, recovery: bool) -> Train:
    return Train(
        steps=STEPS,
        out=folder,
        model=MODEL,
        optim=Optim(lr=1e-2),
        schedule=Schedule(kind="constant"),
        data=Data(sources=["random"], sequence=16, sequences=12, microbatch=1),
        checkpoint=Checkpoint(every=EVERY, keep=3, in_background=False, export=False),
        log=Log(every=1),
        device="cpu",
        parallel=Layout(dp=world),
        recovery=Recovery(
            on=recovery, nodes=world, memory_every=MEMORY_EVERY, same_place=99, silent_s=5
        ),
    )


def start(config: Train, said: Path) -> Any:
    """The run in a process of its own, in a process group of its own; its lines go to a file."""

    def log_line(text: str) -> None:
        with said.open("a") as file:
            file.write(text + "\n")

    def on_record(record: Any) -> None:
        time.sleep(STEP_S)

    def main() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup a run ignores hangups
        world = config.parallel.world()
        try:
            if config.recovery.on:
                finished = run_on_nodes(config, log_line=log_line)
            else:
                finished = run_local(
                    world, lambda rank, world: run(config, rank, log_line, on_record)
                )
            status = INTERRUPTED if finished.outcome.stopped_early else 0
        except KeyboardInterrupt:
            status = 130
        except BaseException as error:  # noqa: BLE001  its text is what a person needs
            log_line(f"error: {type(error).__name__}: {error}")
            status = 1
        os._exit(status)

    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    return process


class Outcome(msgspec.Struct, frozen=True):
    """One round of `--out`."""

    kind: str
    what: str
    world: int
    at: int
    lost: int
    broken: list[str]


class Round:
    """One run and one fault; `broken` has the promises that were not kept."""

    def __init__(self, kind: str, folder: Path, chance: random.Random, world: int) -> None:
        self.kind, self.folder, self.chance, self.world = kind, folder, chance, world
        # Not on the disk that is filled.
        self.said = (folder.parent if kind == "full" else folder).with_suffix(".txt")
        self.recovery = kind == "kill" and chance.random() < 0.5
        self.at = chance.randint(EVERY + 1, STEPS - 6)
        self.broken: list[str] = []
        self.lost = 0
        self.what = ""

    @property
    def config(self) -> Train:
        return recipe(self.folder, self.world, self.recovery)

    @property
    def root(self) -> Path:
        return self.folder / "checkpoints"

    def run(self, unbroken: list[tuple[Any, ...]]) -> None:
        process = start(self.config, self.said)
        try:
            self._until_step(process)
            getattr(self, f"_{self.kind}")(process)
        finally:
            self._reap(process)
        self._check_checkpoints()
        for _ in range(2):
            if self._steps() < STEPS:
                again = start(self.config, self.said)
                self._reap(again, 120)
        self._check_checkpoints()
        rows = logged(self.folder)
        steps = {row[0] for row in rows}  # a full disk costs lines of the log, too
        wanted = [row for row in unbroken if self.kind != "full" or row[0] in steps]
        complete = folders.complete_steps(self.root)
        if rows != wanted or complete[-1:] != [STEPS]:
            self.broken.append("the losses are not those of an unbroken run")

    # -- faults --------------------------------------------------------------------------------------

    def _kill(self, process: Any) -> None:
        """A rank, or the parent of a run without recovery."""
        ranks = [one for one in psutil.Process(process.pid).children() if one.pid != process.pid]
        victims = [one.pid for one in ranks] + ([] if self.recovery else [process.pid])
        victim = self.chance.choice(victims)
        self.what = "parent" if victim == process.pid else "rank"
        self.what += " with recovery" if self.recovery else ""
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        process.join(120)
        if process.exitcode is None:
            return  # `_reap` shows where it hangs
        if not self.recovery:
            self._count_lost(EVERY)
            return
        if process.exitcode != 0:
            self.broken.append(f"the run ended with status {process.exitcode}")
        ledger = read_ledger(self.folder)
        for incident in ledger.incidents if ledger is not None else []:
            self.lost = max(self.lost, incident.steps_lost)
            if incident.steps_lost > MEMORY_EVERY:
                self.broken.append(f"{incident.steps_lost} steps lost, {MEMORY_EVERY} at most")

    def _term(self, process: Any) -> None:
        number, group = self.chance.choice(
            [
                (signal.SIGTERM, False),
                (signal.SIGTERM, True),
                (signal.SIGINT, True),
                (signal.SIGHUP, False),
            ]
        )
        self.what = f"{number.name}{' to the group' if group else ''}"
        (os.killpg if group else os.kill)(process.pid, number)
        process.join(120)
        if process.exitcode != INTERRUPTED:
            self.broken.append(f"the run ended with status {process.exitcode}")
        self._count_lost(0)

    def _full(self, process: Any) -> None:
        filler = self.folder.parent / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
        deadline = time.monotonic() + 60
        while "was not written" not in self._text() and process.is_alive():
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        filler.unlink()
        self.what = "noticed" if "was not written" in self._text() else "between two saves"
        process.join(120)
        if process.exitcode != 0:
            self.broken.append(f"the run ended with status {process.exitcode}")

    def _corrupt(self, process: Any) -> None:
        os.kill(process.pid, signal.SIGTERM)
        process.join(120)
        newest = folders.folder_of(self.root, folders.complete_steps(self.root)[-1])
        path = self.chance.choice(sorted(newest.glob("*.distcp")))
        at = self.chance.randrange(path.stat().st_size)
        self.what = f"byte of {path.name}"
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))
        if folders.complaint(newest) is None:
            self.broken.append("the damage was not found")
        before = folders.complete_steps(self.root)[-2:-1]
        self.lost = self._steps() - (before[0] if before else 0)
        if self.lost > EVERY:
            self.broken.append(f"{self.lost} steps lost, {EVERY} at most")
        self.damaged = newest

    # -- promises ------------------------------------------------------------------------------------

    def _count_lost(self, most: int) -> None:
        complete = folders.complete_steps(self.root)
        self.lost = self._steps() - (complete[-1] if complete else 0)
        if self.lost > most:
            self.broken.append(f"{self.lost} steps lost, {most} at most")

    def _check_checkpoints(self) -> None:
        damaged = getattr(self, "damaged", None)
        for step in folders.complete_steps(self.root):
            folder = folders.folder_of(self.root, step)
            if folder == damaged and folders.complaint(folder) is not None:
                continue
            reason = folders.complaint(folder)
            if reason is not None:
                self.broken.append(f"{folder.name} is called complete: {reason}")
                continue
            with tempfile.TemporaryDirectory() as target:
                try:
                    export_checkpoint(folder, Path(target) / "model", None)
                except Exception as error:  # noqa: BLE001  any error breaks the promise
                    self.broken.append(f"{folder.name} does not load: {error}")

    def _steps(self) -> int:
        rows = read_log(self.folder) if (self.folder / "log.jsonl").exists() else []
        return rows[-1].step if rows else 0

    def _text(self) -> str:
        return self.said.read_text() if self.said.exists() else ""

    def _until_step(self, process: Any) -> None:
        deadline = time.monotonic() + 120
        while self._steps() < self.at and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _reap(self, process: Any, seconds: float = 60) -> None:
        below = []
        with contextlib.suppress(psutil.Error):
            below = psutil.Process(process.pid).children(recursive=True)
        process.join(seconds)
        if process.is_alive():
            self.broken.append("the run hangs")
            print(self._text()[-2000:], flush=True)
            print_stacks([process.pid, *(one.pid for one in below)])
            process.kill()
            process.join()
        _, left = psutil.wait_procs(below, timeout=5)
        alive = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        if alive:
            self.broken.append(f"{len(alive)} processes are left")
            for one in alive:
                one.kill()


def print_stacks(pids: list[int]) -> None:
    """Where each process of a run that hangs is waiting."""
    tool = shutil.which("py-spy")
    for pid in pids if tool else []:
        subprocess.run([tool, "dump", "--pid", str(pid)], check=False, timeout=30)


def logged(folder: Path) -> list[tuple[Any, ...]]:
    return [(record.step, record.loss, record.norm) for record in read_log(folder)]


@contextlib.contextmanager
def small_disk(folder: Path) -> Any:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        raise SystemExit("full disks need the right to mount: run as root, or with --full 0")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, count in (("kills", 50), ("terms", 20), ("full", 10), ("corrupt", 10)):
        parser.add_argument(f"--{name}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    kinds = ["kill"] * options.kills + ["term"] * options.terms
    kinds += ["full"] * options.full + ["corrupt"] * options.corrupt
    random.Random(options.seed).shuffle(kinds)
    done = read_outcomes(options.out)
    with tempfile.TemporaryDirectory(prefix="cairn-soak-") as place:
        unbroken = unbroken_runs(Path(place)) if len(done) < len(kinds) else {}
        for number in range(len(done), len(kinds)):
            chance = random.Random(f"{options.seed}/{number}")
            done.append(run_round(kinds[number], Path(place) / f"run-{number}", chance, unbroken))
            one = done[-1]
            print(
                f"{number + 1:3} {one.kind:18} {one.what:24} {one.world} ranks, step {one.at:2}, "
                f"{one.lost} lost: {'; '.join(one.broken) or 'kept'}",
                flush=True,
            )
            write_outcomes(options.out, done)
    raise SystemExit(any(one.broken for one in done))


def unbroken_runs(place: Path) -> dict[int, list[tuple[Any, ...]]]:
    """The log of a run without a fault, by the number of ranks."""
    runs = {}
    for world in (2, 3, 4):
        folder = place / f"unbroken-{world}"
        process = start(recipe(folder, world, False), place / "u")
        process.join(300)
        runs[world] = logged(folder)
        assert len(runs[world]) == STEPS, (place / "u").read_text()
    return runs


def run_round(
    kind: str, folder: Path, chance: random.Random, unbroken: dict[int, list[tuple[Any, ...]]]
) -> Outcome:
    with small_disk(folder) if kind == "full" else contextlib.nullcontext():
        home = folder / "run" if kind == "full" else folder
        one = Round(kind, home, chance, chance.choice((2, 3, 4)))
        one.run(unbroken[one.world])
    label = kind + (" with recovery" if one.recovery else "")
    return Outcome(label, one.what, one.world, one.at, one.lost, one.broken)


def read_outcomes(out: Path | None) -> list[Outcome]:
    if out is None or not out.exists():
        return []
    return msgspec.convert(json.loads(out.read_text())["rounds"], list[Outcome])


def write_outcomes(out: Path | None, done: list[Outcome]) -> None:
    if out is None:
        return
    table: dict[str, dict[str, int]] = {}
    for one in done:
        row = table.setdefault(one.kind, {"runs": 0, "broken": 0, "most lost": 0})
        row["runs"] += 1
        row["broken"] += bool(one.broken)
        row["most lost"] = max(row["most lost"], one.lost)
    rounds = msgspec.to_builtins(done)
    text = json.dumps({"faults": dict(sorted(table.items())), "rounds": rounds}, indent=1)
    out.write_text(text + "\n")


if __name__ == "__main__":
    main()
