"""Executes one rank's part of a schedule: actions in order, messages beside them.

    for op in ops:   F  -> a chunk's forward      send / receive  start, and are waited for where they are needed
                     B  -> backward               delivered       what was sent may go
                     I, W -> its two parts

What a chunk computes is injected (`Compute`); which order is right was decided by `schedules`. Activations have the
same shape at every border, known from the microbatch, so nothing is negotiated. Returns what was executed, in order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cairn.train.parallel.pipeline.actions import Action, Schedule
from cairn.train.parallel.pipeline.deferred import Deferred, compute_deferred
from cairn.train.parallel.pipeline.transfers import Key, Message, Op, following


class Compute(Protocol):
    def forward(
        self, chunk: int, microbatch: int, x_TD: Tensor | None, deferred: Deferred | None
    ) -> Any:
        """The chunk's output for the next stage; on the last stage what its head makes. x None: first stage.

        In a training step the head makes the share of the loss, a scalar that is walked backward.

        `deferred`: where weight gradients of linear maps go, if they are to be computed later (see `deferred`).
        """
        ...

    def blank(self, microbatch: int) -> Tensor:
        """An uninitialised tensor of an activation's shape at a border of stages."""
        ...

    def before_backward(self, chunk: int, last: bool) -> None:
        """Told before each backward of a chunk; `last`: no other of this step follows."""
        ...

    def after_backward(self, chunk: int) -> None:
        """Told when a chunk's gradients have changed."""
        ...


class Pipeline:
    """Pipeline executor of a rank; `run` executes the forwards and backwards of a step."""

    def __init__(
        self,
        schedule: Schedule,
        ops: Sequence[Op],
        rank: int,
        group: Any,
        peer: Callable[[int], int],
        first_trained: int = 0,
    ) -> None:
        """`peer`: the world rank of another rank of this pipeline. `first_trained`: as the messages were made for."""
        self.schedule, self.ops, self.rank = schedule, ops, rank
        self.group, self.peer, self.first_trained = group, peer, first_trained
        self.last_backward = {a.chunk: a for a in schedule.ranks[rank] if a.kind in "BI"}

    def run(self, compute: Compute) -> tuple[dict[int, Any], list[Action]]:
        """Run a step; returns the results by microbatch (on the last stage) and the executed actions."""
        step = _Step(self, compute)
        executed = []
        for op in self.ops:
            if isinstance(op, Message):
                step.start(op)
            else:
                step.do(op)
                executed.append(op)
        step.finish()
        return step.outputs, executed


class _Step:
    """State of a running step."""

    def __init__(self, pipeline: Pipeline, compute: Compute) -> None:
        self.pipeline, self.compute, self.schedule = pipeline, compute, pipeline.schedule
        self.kept: dict[tuple[int, int], tuple[Tensor | None, Tensor, Deferred | None]] = {}
        self.arrived: dict[Key, Tensor] = {}  # handed over on this rank, or received
        self.coming: dict[Key, tuple[Any, Tensor]] = {}
        self.leaving: dict[Key, tuple[Any, Tensor]] = {}  # a tensor lives until it is delivered
        self.outputs: dict[int, Any] = {}  # of the last stage, by microbatch
        self.splits = self.schedule.splits_backward()
        self.trains = not self.schedule.is_forward_only()

    # -- messages -----------------------------------------------------------------------------

    def start(self, message: Message) -> None:
        key = message.key
        if message.way == "delivered":
            self.leaving.pop(key)[0].wait()  # it is there: this frees what the backend holds
            return
        tag = message.tag(self.schedule.microbatches)
        peer, group = self.pipeline.peer(message.peer), self.pipeline.group
        if message.way == "send":
            tensor = self.arrived.pop(key).contiguous()
            self.leaving[key] = (dist.isend(tensor, peer, group, tag), tensor)
        else:
            blank = self.compute.blank(message.microbatch)
            self.coming[key] = (dist.irecv(blank, peer, group, tag), blank)

    def take(self, what: str, stage: int, microbatch: int) -> Tensor:
        key = (what, stage, microbatch)
        if key in self.coming:
            handle, tensor = self.coming.pop(key)
            handle.wait()
            return tensor
        return self.arrived.pop(key)

    def finish(self) -> None:
        for handle, _ in self.leaving.values():
            handle.wait()
        if self.kept or self.coming or self.arrived:
            left = f"{list(self.kept)} {list(self.coming)} {list(self.arrived)}"
            raise RuntimeError(f"a step left something behind: {left}")

    # -- actions ------------------------------------------------------------------------------

    def do(self, action: Action) -> None:
        if action.kind == "F":
            self.forward(action)
        elif action.kind == "W":
            self.weight_gradients(action)
        else:
            self.backward(action)

    def forward(self, action: Action) -> None:
        stage = self.schedule.stage_of(self.pipeline.rank, action.chunk)
        x_TD = None
        if stage:
            needs_gradient = self.trains and stage > self.pipeline.first_trained
            x_TD = self.take("F", stage, action.microbatch).detach().requires_grad_(needs_gradient)
        deferred: Deferred | None = [] if self.splits else None
        y = self.compute.forward(action.chunk, action.microbatch, x_TD, deferred)
        if self.trains:
            self.kept[action.chunk, action.microbatch] = (x_TD, y, deferred)
        after = following(self.schedule, self.pipeline.rank, action)
        if after is None:
            self.outputs[action.microbatch] = y.detach() if self.trains else y
        else:
            self.arrived["F", after, action.microbatch] = y.detach()

    def backward(self, action: Action) -> None:
        stage = self.schedule.stage_of(self.pipeline.rank, action.chunk)
        x_TD, y, deferred = self.kept.pop((action.chunk, action.microbatch))
        last_stage = stage + 1 == self.schedule.stages
        trained = stage >= self.pipeline.first_trained
        gradient = self.take("I", stage, action.microbatch) if trained and not last_stage else None
        last = self.pipeline.last_backward[action.chunk] == action
        self.compute.before_backward(action.chunk, last)
        if trained:
            torch.autograd.backward(y, gradient)
        if x_TD is not None and x_TD.grad is not None:
            self.arrived["I", stage - 1, action.microbatch] = x_TD.grad
        if deferred is not None and action.kind == "B":
            compute_deferred(deferred)
        self.compute.after_backward(action.chunk)
        if deferred is None or action.kind == "B":
            return
        self.kept[action.chunk, action.microbatch] = (None, y.detach(), deferred)

    def weight_gradients(self, action: Action) -> None:
        _, _, deferred = self.kept.pop((action.chunk, action.microbatch))
        compute_deferred(deferred or [])
        self.compute.after_backward(action.chunk)
