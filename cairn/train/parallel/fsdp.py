"""FSDP: parameters, gradients and optimizer states cut by rows; a layer's weights are whole only while it computes.

Torch's `fully_shard` does the work, layer by layer. Here is only what this project asks of it: sums in place of means,
rows of several microbatches added in float32, and local rows as plain tensors, so that optimizers and checkpoints need
to know nothing about DTensors.

    mesh   dp x shard      shard = fsdp x cp: cut over these, copied over dp (HSDP)

    each backward   gradients -reduce-scatter-> my rows, added to those of earlier microbatches
    the last one    with dp: -all-reduce-> summed over the copies as well

With `whole` gradients stay on their rank until the last backward and leave once: fewer bytes travel, and every rank
holds 4 bytes for each parameter of its stages.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from cairn.train.parallel.gradients import Gradients
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.rows import Rows, rows_of
from cairn.train.parallel.stage import Stage


class Fsdp:
    """The stages of this rank, cut over the ranks that read other samples."""

    def __init__(
        self,
        stages: Iterable[Stage],
        mesh: Mesh,
        ignored: set[nn.Parameter],
        reduce_dtype: torch.dtype | None = None,
        reshard: bool = True,
        whole: bool = False,
    ) -> None:
        """`ignored`: parameters that others look after. `reshard`: free weights between forward and backward.

        Frozen parameters are cut like the others, and have no gradients.
        """
        self.stages = list(stages)
        self.whole = whole
        self.copies = mesh.size("dp")
        full = {
            name: p.shape[0]
            for stage in self.stages
            for name, p in stage.named_parameters()
            if p not in ignored and p.requires_grad
        }
        for stage in self.stages:
            _shard(stage, mesh, ignored, reduce_dtype, reshard)
        rank = mesh.rank("fsdp") * mesh.size("cp") + mesh.rank("cp")
        size = mesh.size("fsdp") * mesh.size("cp")
        self.rows: dict[str, Rows] = {n: rows_of(r, rank, size) for n, r in full.items()}
        # Those of a stage apart: stages finish one by one.
        self.held = [Gradients(self._sharded(stage), _local) for stage in self.stages]
        self.local = {
            name: nn.Parameter(_local(p))
            for stage in self.stages
            for name, p in self._sharded(stage).items()
            if len(self.rows[name])
        }

    def begin(self, microbatches: int) -> None:
        pass

    def after_forward(self) -> None:
        """Reshard after a pass without backward, because gathered weights would not see an update."""
        for stage in self.stages:
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()

    def before_backward(self, last: bool) -> None:
        for chunk in range(len(self.stages)):
            self.before_backward_of(chunk, last)

    def before_backward_of(self, chunk: int, last: bool) -> None:
        stage = self.stages[chunk]
        assert isinstance(stage, FSDPModule)
        self.held[chunk].collect()
        leaves = last or not self.whole
        stage.set_is_last_backward(leaves)  # wait for what leaves: the next one adds to it
        stage.set_requires_gradient_sync(leaves)
        stage.set_requires_all_reduce(last)  # until then torch adds up the sums of this copy

    def after_backward(self) -> None:
        pass

    def finish(self) -> None:
        for stage in self.held:
            if stage.sums:
                stage.collect()

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.local

    def gradients(self) -> dict[str, Tensor]:
        collected = {name: g for stage in self.held for name, g in stage.found().items()}
        return {name: g for name, g in collected.items() if name in self.local}

    def zero_grad(self) -> None:
        for stage in self.held:
            stage.clear()

    def _sharded(self, stage: Stage) -> dict[str, nn.Parameter]:
        return {name: p for name, p in stage.named_parameters() if name in self.rows}


def _shard(
    stage: Stage,
    mesh: Mesh,
    ignored: set[nn.Parameter],
    reduce_dtype: torch.dtype | None,
    reshard: bool,
) -> None:
    whole = mesh.device_mesh
    assert whole is not None
    part = whole["dp", "shard"] if mesh.size("dp") > 1 else whole["shard"]
    options: dict[str, Any] = {
        "mesh": part,
        "reshard_after_forward": reshard,
        "ignored_params": ignored,
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype),
    }
    for layer in stage.layers.values():
        fully_shard(layer, **options)
    fully_shard(stage, **options)
    assert isinstance(stage, FSDPModule)
    # The loss is divided by all valid tokens already; and gloo cannot divide while it sums.
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _local(tensor: Any) -> Tensor:
    return tensor.to_local().detach()
