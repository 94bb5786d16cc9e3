"""A rank of a small launched training run, with faults at exact steps; for the tests of recovery under `cairn launch`.

    python launched_worker.py RECIPE.json RUN

Each once: after step 3 the memory of rank 0's node is killed; after step 5 rank 1 stops itself; in step 8 rank 1 never
comes back from its own code; after step 9 the node of rank 1 goes, as when its power does. From step 13 on rank 1 is
slow, until somebody has noticed; rank 0 waits for that before the last step.
"""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import torch

from cairn.train.config import Train
from cairn.train.recovery import launched
from cairn.train.recovery.findings import read_found
from cairn.train.recovery.launched_loop import LaunchedLoop
from cairn.train.recovery.process_state import process_state

FORGETFUL, STOPPED, HANGS, LOST = 3, 5, 7, 9
SLOW = 12


def main(recipe: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    config = msgspec.json.decode(
        recipe.read_bytes(), type=Train, dec_hook=lambda kind, value: kind(value)
    )
    rank = int(os.environ["RANK"])

    step = LaunchedLoop._one_step

    def stepped(loop):
        step(loop)
        fault(loop, rank, folder)

    class Faulty(LaunchedLoop):
        _one_step = stepped

        def __init__(self, *args, **named):
            super().__init__(*args, **named)
            compute = self.state.parallel.forward_backward

            def computed(*args):
                in_its_own_code(self, rank, folder)
                return compute(*args)

            self.state.parallel.forward_backward = computed

    launched.LaunchedLoop = Faulty
    launched.run_launched(config, rank, "cpu")


def fault(loop: LaunchedLoop, rank: int, folder: Path) -> None:
    step = loop.state.step
    if rank == 0 and step == FORGETFUL and once(folder / "forgetful"):
        memory = int(loop.board.nodes["pid"][0])
        os.kill(memory, signal.SIGKILL)
        wait_until(lambda: process_state(memory) in ("", "Z"))
    if rank == 1 and step == STOPPED and once(folder / "stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == 1 and step == LOST and not (folder / "lost").exists():
        wait_until(lambda: loop.board.ranks["replicated"][rank] == LOST - 1)
        once(folder / "lost")
        launcher = int(os.environ["CAIRN_NODE_LAUNCHER"])
        os.killpg(os.getpgid(launcher), signal.SIGKILL)
        time.sleep(60)  # the kernel ends this rank with its node

    if rank == 0 and step == loop.config.steps - 1:
        wait_until(lambda: named(folder))


def in_its_own_code(loop: LaunchedLoop, rank: int, folder: Path) -> None:
    if rank == 1 and loop.state.step == HANGS and once(folder / "hangs"):
        wait_until(lambda: False)
    if rank == 1 and loop.state.step >= SLOW and not named(folder):
        time.sleep(0.5)


def named(folder: Path) -> bool:
    return any(found.cause == "straggler" for found in read_found(folder))


def wait_until(condition) -> None:
    while not condition():
        time.sleep(0.01)


def once(mark: Path) -> bool:
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
