"""The microbatches of one pass over the model: what this rank has of each, and what its stages make of it.

    batch --context split--> local tokens --stages--> x [T, D] or, on the last stage, what the head makes

One object for a training step and for a pass without gradients; they differ in the head and in the schedule. The
pipeline's executor asks it (`pipeline.run.Compute`), and so does a rank that has the whole model.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cairn.models.attend import Attend
from cairn.models.linear.maps import Vocabulary
from cairn.train.parallel.context import attend_for, local_batch
from cairn.train.parallel.data import Sync
from cairn.train.parallel.layout import Strategy
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.pipeline.deferred import Deferred, deferring
from cairn.train.parallel.stage import Stage

if TYPE_CHECKING:
    from cairn.train.data.batch import Batch

MakeAttend = Callable[["Batch"], Attend]
BatchHead = Callable[[Tensor, Vocabulary, "Batch"], Any]  # hidden [T, D], output projection, batch


class Microbatches:
    def __init__(
        self,
        stages: Sequence[Stage],
        syncs: Sequence[Sync],
        mesh: Mesh,
        strategy: Strategy,
        attend: MakeAttend | None,
        batches: "Sequence[Batch]",
        head: BatchHead,
    ) -> None:
        self.stages, self.syncs, self.head = stages, syncs, head
        self.cut = mesh.size("tp") if strategy.sequence_parallel else 1
        group, kind = mesh.group("cp"), strategy.attention
        self.local = [local_batch(batch, group, kind) for batch in batches]
        self.attends = [attend_for(batch, group, kind, attend) for batch in batches]

    def __len__(self) -> int:
        return len(self.local)

    def forward(
        self, chunk: int, microbatch: int, x_TD: Tensor | None, deferred: Deferred | None
    ) -> Any:
        batch, stage = self.local[microbatch], self.stages[chunk]
        head = None
        if stage.share.last:

            def head(hidden_TD: Tensor, vocabulary: Vocabulary) -> Any:
                return self.head(hidden_TD, vocabulary, batch)

        x = batch.tokens_T if x_TD is None else x_TD
        with deferring(deferred):
            return stage(x, batch.positions_T, self.attends[microbatch], head, deferred)

    def blank(self, microbatch: int) -> Tensor:
        tokens_T, stage = self.local[microbatch].tokens_T, self.stages[0]
        dtype = next(iter(stage.layers.parameters())).dtype
        shape = (len(tokens_T) // self.cut, stage.spec.hidden)
        return torch.empty(shape, dtype=dtype, device=tokens_T.device)

    def before_backward(self, chunk: int, last: bool) -> None:
        for sync in self.syncs:
            sync.before_backward_of(chunk, last)

    def after_backward(self, chunk: int) -> None:
        for sync in self.syncs:
            sync.after_backward()
