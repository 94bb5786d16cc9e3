"""Compute time of a rank before it waits for others, which distinguishes a straggler from waiting ranks.

    tokens of all ranks summed --begin-- forward, backward --end-- gradients of all ranks waited for

At the beginning all ranks are together, and between the two marks replicas wait for nobody. On a GPU both are events of
its stream, because the host only launches the work: they are read once the device has passed them, a step later, and
nothing waits for that. Elsewhere the host's clock is right.
"""

import time
from collections import deque

import torch

Mark = int | torch.cuda.Event  # nanoseconds of the host, or an event that has a time


class ComputeTime:
    """Times the first forward and backward of each step; costs nothing unless `step_ended` is called after each."""

    def __init__(self, device: torch.device | str) -> None:
        self.on_gpu = torch.device(device).type == "cuda"
        self._began: Mark | None = None
        self._ended: Mark | None = None
        self._steps: deque[tuple[int, Mark | None, Mark | None]] = deque()  # not read yet, in order

    def begin(self) -> None:
        self._began = self._now() if self._began is None else self._began

    def end(self) -> None:
        self._ended = self._now() if self._ended is None else self._ended

    def step_ended(self, step: int) -> list[tuple[int, int]]:
        """Steps whose time is known by now, this one or earlier ones, with nanoseconds; 0: nothing was computed."""
        self._steps.append((step, self._began, self._ended))
        self._began = self._ended = None
        known = []
        while self._steps and _is_over(self._steps[0][2]):
            number, began, ended = self._steps.popleft()
            known.append((number, _between(began, ended)))
        return known

    def _now(self) -> Mark:
        if not self.on_gpu:
            return time.monotonic_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _is_over(mark: Mark | None) -> bool:
    return mark is None or isinstance(mark, int) or mark.query()


def _between(began: Mark | None, ended: Mark | None) -> int:
    if began is None or ended is None:
        return 0
    if isinstance(began, int) or isinstance(ended, int):
        return ended - began  # pyrefly: ignore[unsupported-operation]  both are of the host
    return int(began.elapsed_time(ended) * 1e6)
