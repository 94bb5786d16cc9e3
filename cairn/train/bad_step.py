"""Is this step's loss one to learn from? What to do if it is not.

    loss of a step --NaN, Inf, above the limit--> bad --action--> skip | rewind | stop
                   `--otherwise--> remembered: the next limit comes from it

The verdict falls twice. On the device, before the update, by `veto`: a bad step changes no weight, and the host need
not wait to make sure. On the host, when the number arrives, by `Watch`: it decides what happens next and writes down
which samples were in the batch. Pure but for the one function that writes; knows no model.
"""

import math
from collections import deque
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch import Tensor

from cairn.train.config import BadStep

Action = Literal["go on", "skip", "rewind", "stop"]


class Verdict(msgspec.Struct, frozen=True):
    action: Action
    why: str = ""


class Watch:
    """Recent losses, and how many bad ones came in a row."""

    def __init__(self, policy: BadStep) -> None:
        self.policy = policy
        self.recent: deque[float] = deque(maxlen=policy.window)
        self.in_a_row = 0

    def limit(self) -> float:
        """Losses above this are spikes; infinite while too little is known."""
        if not self.policy.spike or len(self.recent) < min(self.policy.window, 10):
            return math.inf
        mean = sum(self.recent) / len(self.recent)
        variance = sum((loss - mean) ** 2 for loss in self.recent) / len(self.recent)
        # A perfectly flat loss would make every wobble a spike.
        return mean + self.policy.spike * max(math.sqrt(variance), 0.01 * abs(mean))

    def judge(self, loss: float, norm: float, limit: float, valid: float = 1) -> Verdict:
        """`limit`: the one that held when the step began. `valid`: tokens that had a loss."""
        why = _complaint(loss, norm, limit) if valid else "no token of the step is to be learnt"
        if why is None:
            self.in_a_row = 0
            self.recent.append(loss)
            return Verdict("go on")
        self.in_a_row += 1
        if self.in_a_row >= self.policy.most:
            return Verdict("stop", f"{why}, as {self.in_a_row} steps in a row")
        return Verdict(self.policy.action, why)

    def state(self) -> list[float]:
        return [float(self.in_a_row), *self.recent]

    def restore(self, state: list[float]) -> None:
        self.in_a_row = int(state[0])
        self.recent = deque(state[1:], maxlen=self.policy.window)


def _complaint(loss: float, norm: float, limit: float) -> str | None:
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    if not math.isfinite(norm):
        return f"the norm of the gradients is {norm}"
    return f"the loss {loss:.4g} is above {limit:.4g}" if loss > limit else None


def veto(factor: Tensor, loss: Tensor, limit: float) -> Tensor:
    """`factor`, or NaN where the loss is bad: an optimizer that gets NaN changes nothing."""
    fine = loss.isfinite() & (loss <= limit)
    return torch.where(fine, factor, torch.nan)


def write_down(path: Path, step: int, verdict: Verdict, loss: float, ids: list[int]) -> None:
    """Append a bad step and its samples to bad_steps.jsonl."""
    line = {
        "step": step,
        "action": verdict.action,
        "why": verdict.why,
        "loss": str(loss),
        "samples": ids,
    }
    with path.open("ab") as file:
        file.write(msgspec.json.encode(line) + b"\n")
