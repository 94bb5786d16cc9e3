"""Faults of a device at numbered points of a step: raised once or at every pass, or a step that never ends.

    faults = Faults(folder, "sampling", "error")
    faults.install()     in the process that computes: wraps one method of the engine
    faults.arm()         from any process: the fault happens at one of the next passes

Which pass it is stands in files, so that workers which are started again know what has happened before.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cairn.serve.engine.adapters import Adapters
from cairn.serve.engine.batch import Batch
from cairn.serve.engine.block_manager import BlockManager
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.ranks import Ranks
from cairn.serve.engine.runner import Flight, Runner
from cairn.serve.engine.sampler import Sampler
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.grammar import GrammarConstraint


class Point(NamedTuple):
    owner: type
    method: str
    when: str = "before"
    # Of the device: the step fails, and the engine may go on. Elsewhere the engine has lost its books, and ends.
    on_device: bool = True
    asks: str | None = None  # the only request of a test that comes here; None: all do
    at: int = 2  # the pass at which it fails, so that some requests have begun


POINTS = {
    "scheduling": Point(Scheduler, "schedule", on_device=False),
    "scheduled": Point(Scheduler, "schedule", "after", on_device=False),
    "launching": Point(Runner, "launch"),
    "a row of the sampler": Point(Sampler, "admit"),
    "a row of the batch": Point(Batch, "admit"),
    "rows not written": Point(Sampler, "flush"),
    "rows written": Point(Sampler, "flush", "after"),
    "adapters": Point(Adapters, "routed"),
    "before the copy": Point(Batch, "stage"),
    "after the copy": Point(Batch, "stage", "after"),
    "blank pages": Point(PagePool, "blank"),
    "inputs": Point(Batch, "make_inputs"),
    "attention": Point(Paged, "__init__"),
    "before the layers": Point(Runner, "compute"),
    "before sampling": Point(Sampler, "sample"),
    "after sampling": Point(Sampler, "sample", "after"),
    "tokens kept": Point(Runner, "keep", "after"),
    "sampling with a grammar": Point(Sampler, "sample_special", asks="grammar"),
    "mask of a grammar": Point(GrammarConstraint, "mask", asks="grammar"),
    "log-probabilities": Point(Sampler, "logprobs", asks="stream"),
    "log-probabilities of a prompt": Point(Runner, "_prompt_logprobs", asks="whole", at=1),
    "copy to the host": Point(Runner, "_flight", "after"),
    "launched": Point(Runner, "launch", "after"),
    "landing": Point(Flight, "land"),
    "landed": Point(Flight, "land", "after"),
    "grammar's next state": Point(GrammarConstraint, "accept", on_device=False, asks="grammar"),
    "publishing pages": Point(BlockManager, "publish", on_device=False),
    "updating": Point(Scheduler, "update", on_device=False),
    "updated": Point(Scheduler, "update", "after", on_device=False),
    "end of a step": Point(Engine, "step", "after", on_device=False),
}
COLLECTIVES = {  # of several ranks
    "before a sum": Point(Ranks, "reduce"),
    "after a sum": Point(Ranks, "reduce", "after"),
    "before the logits are gathered": Point(Ranks, "gather"),
    "after the logits are gathered": Point(Ranks, "gather", "after"),
}
KINDS = ("error", "error for ever", "memory", "memory for ever", "hang")


def sticky() -> Exception:
    """As torch reports it, from every call once it has happened."""
    return torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later"
    )


def out_of_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines.")


class Faults:
    def __init__(self, folder: Path, point: str, kind: str) -> None:
        self.point, self.kind = (POINTS | COLLECTIVES)[point], kind
        self._armed, self._fired, self._released = (
            folder / name for name in ("armed", "fired", "released")
        )
        self._passes = 0

    def arm(self) -> None:
        self._armed.touch()

    def release(self) -> None:
        """A step that hangs goes on, and so does a worker that `hold_after_fault` holds."""
        self._released.touch()

    def hold_after_fault(self) -> None:
        """Of workers that are started again: wait for `release`."""
        while self.fired and not self._released.exists():
            time.sleep(0.01)

    @property
    def fired(self) -> bool:
        return self._fired.exists()

    def install(self, put: Callable[[Any, str, Any], None] = setattr) -> None:
        """`put`: as `setattr`; in a process that others use later, pytest's monkeypatch."""
        owner, method, when = self.point[:3]
        original = getattr(owner, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if when == "before":
                self._pass()
            result = original(*args, **kwargs)
            if when == "after":
                self._pass()
            return result

        put(owner, method, wrapped)

    def _pass(self) -> None:
        if not self._armed.exists():
            return
        self._passes += 1
        if self._passes < self.point.at and not self.fired:
            return
        self._fired.touch()
        if not self.kind.endswith("for ever"):
            self._armed.unlink()
        if self.kind == "hang":
            while not self._released.exists():
                time.sleep(0.01)
            return
        raise sticky() if self.kind.startswith("error") else out_of_memory()
