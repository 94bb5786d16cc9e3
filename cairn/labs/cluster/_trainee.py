"""A very small training run that can be killed: its state on disk through the trainer's own saver, nothing else.

    step n: batch n (drawn from n alone) -> gradient -> momentum -> weights          the same on any rank
    every k steps: Saver.save, and the step in a file that the parent watches

Deterministic to the bit, so that a run that died and came back can be compared with one that did not.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

SIZE = 64
PATIENCE_S = 60.0


class Run:
    """Weights and momentum; `step` of them are done."""

    def __init__(self) -> None:
        import torch

        self.weight = torch.zeros(SIZE, SIZE)
        self.momentum = torch.zeros(SIZE, SIZE)
        self.step = 0

    def train_one(self) -> None:
        import torch

        draw = torch.Generator().manual_seed(self.step)
        x_ND = torch.randn(32, SIZE, generator=draw)
        target_ND = x_ND.roll(1, dims=1)  # what it has to learn
        error_ND = x_ND @ self.weight - target_ND
        self.momentum.mul_(0.9).add_(x_ND.t() @ error_ND / 32)
        self.weight.sub_(0.02 * self.momentum)
        self.step += 1

    def loss(self) -> float:
        import torch

        x_ND = torch.randn(256, SIZE, generator=torch.Generator().manual_seed(10**6))
        return float((x_ND @ self.weight - x_ND.roll(1, dims=1)).pow(2).mean())


def resume(root: Path, warnings: list[str]) -> Run:
    """From the newest checkpoint that can be trusted, or from nothing."""
    from cairn.train.checkpoint.folder import newest
    from cairn.train.checkpoint.load import load_pieces
    from cairn.train.checkpoint.piece import whole

    run = Run()
    checkpoint = newest(root, warnings)
    if checkpoint is not None:
        load_pieces(
            checkpoint,
            {"weight": whole(run.weight), "momentum": whole(run.momentum)},
            together=False,
        )
        run.step = int(checkpoint.name.rpartition("-")[2])
    return run


def train(root: Path, steps: int, every: int, pause_s: float = 0.0) -> Run:
    """Until `steps` are done; the file `progress` has the step after each."""
    import torch

    from cairn.train.checkpoint.piece import whole
    from cairn.train.checkpoint.save import Saver

    torch.set_num_threads(1)
    root.mkdir(parents=True, exist_ok=True)
    run = resume(root, [])
    saver = Saver(root, keep=3, in_background=False)
    (root / "resumed").write_text(str(run.step))
    while run.step < steps:
        run.train_one()
        if run.step % every == 0:
            pieces = {"weight": whole(run.weight), "momentum": whole(run.momentum)}
            saver.save(run.step, pieces, {"step": run.step})
        (root / "progress").write_text(str(run.step))
        time.sleep(pause_s)
    return run


def step_of(root: Path, name: str = "progress") -> int:
    """As the run last wrote it; 0 before."""
    try:
        return int((root / name).read_text() or 0)
    except FileNotFoundError:
        return 0


def start(root: Path, steps: int, every: int, pause_s: float) -> "BaseProcess":
    """`train` in a process of its own."""
    from cairn.labs.ranks import process_context

    if (root / "progress").exists():  # the steps of the process before are not this one's
        (root / "progress").write_text(str(resume(root, []).step))
    arguments = (root, steps, every, pause_s)
    process = process_context(train).Process(target=train, args=arguments, daemon=True)
    process.start()
    return process


def kill_at(root: Path, process: "BaseProcess", step: int) -> int:
    """Waits for a step, kills, and says how far it had come."""
    deadline = time.monotonic() + PATIENCE_S
    while (seen := step_of(root)) < step and time.monotonic() < deadline and process.is_alive():
        time.sleep(0.002)
    process.kill()  # SIGKILL: no exit handler, no flush, no goodbye
    process.join(PATIENCE_S)
    return max(seen, step_of(root))  # it may have died while it wrote the next one
