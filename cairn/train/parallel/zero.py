"""ZeRO in the optimizer: every rank the whole model, but each updates only its rows of every parameter.

    backward -> gradients -reduce-scatter-> my rows, summed -> optimizer -> my rows of the weights -all-gather-> weights

    stage 1   optimizer states are cut; gradients are whole until the end of the step
    stage 2   gradients are cut as well: each microbatch's buckets leave during backward and only my rows stay
              (in a pipeline, whose backwards are not announced, as stage 1)

As many bytes travel as in an all-reduce (arXiv:1910.02054). My rows are a view of the whole parameter, so the optimizer
writes straight into the model; other ranks' rows arrive before the next forward.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cairn.train.parallel.buckets import BYTES, Buckets
from cairn.train.parallel.collectives import all_gather, start_reduce_scatter
from cairn.train.parallel.gradients import Gradients
from cairn.train.parallel.mesh import Group
from cairn.train.parallel.rows import rows_of


class Zero:
    """ZeRO rank: shards optimizer states (stage 1) and gradients (stage 2)."""

    copies = 1  # no row is updated twice

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        stage: int,
        bucket_bytes: int = BYTES,
    ) -> None:
        self.group, self.stage = group, stage
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.held = Gradients(parameters)
        self.rows = {n: rows_of(p.shape[0], self.rank, self.size) for n, p in parameters.items()}
        self.mine = {
            name: nn.Parameter(p.detach()[self.rows[name].start : self.rows[name].stop])
            for name, p in parameters.items()
            if len(self.rows[name])
        }
        self.shards: dict[str, Tensor] = {}  # gradients of my rows
        self.buckets = Buckets(self.held.parameters, self._launch, bucket_bytes)
        self._flying: list[tuple[list[str], Tensor, Tensor, Any]] = []
        # Other ranks may have written their rows: at first as well, where a checkpoint filled each rank's own.
        self._stale = True

    def begin(self, microbatches: int) -> None:
        if self._stale:
            self.publish()

    def after_forward(self) -> None:
        pass

    def before_backward(self, last: bool) -> None:
        if last or self.stage == 2:
            self.buckets.arm()

    def before_backward_of(self, chunk: int, last: bool) -> None:
        pass

    def after_backward(self) -> None:
        if self.stage == 2 and self.buckets.armed:
            self._land()
        elif not self._flying:
            self.held.collect()

    def finish(self) -> None:
        if self.stage == 1 or self.held.found():
            self._land()
        self._stale = True

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.mine

    def gradients(self) -> dict[str, Tensor]:
        return {name: gradient for name, gradient in self.shards.items() if name in self.mine}

    def zero_grad(self) -> None:
        self.held.clear()
        self.shards.clear()

    @torch.no_grad()
    def publish(self) -> None:
        """All ranks' rows of every parameter: called after the optimizer, or before the next forward at the latest."""
        for bucket in self.buckets.buckets:
            rows = torch.cat([self._own(name) for name in bucket])
            whole = all_gather(rows, self.group).view(self.size, -1)
            self._write_back(bucket, whole)
        self._stale = False

    # -- the way there --------------------------------------------------------------------------

    def _launch(self, bucket: list[str]) -> None:
        """[ranks, rows of each parameter side by side], of which each rank gets its line, summed."""
        self.held.collect()
        lines = [self._lines(self.held.or_zeros(name)) for name in bucket]
        flat = torch.cat(lines, dim=1).flatten()
        out, handle = start_reduce_scatter(flat, self.group)
        for name in bucket:
            self.held.put(name, None)
        self._flying.append((bucket, flat, out, handle))

    def _land(self) -> None:
        self.buckets.flush()
        for bucket, _, out, handle in self._flying:
            handle.wait()
            sizes = [self._padded_shape(name).numel() for name in bucket]
            for name, part in zip(bucket, out.split(sizes), strict=True):
                rows = part.view(self._padded_shape(name))[: len(self.rows[name])]
                if name in self.shards:
                    self.shards[name].add_(rows)
                else:
                    self.shards[name] = rows.clone()
        self._flying.clear()

    def _lines(self, whole: Tensor) -> Tensor:
        """[R, ...] -> [ranks, rows of one rank * ...], with zeros behind the last row."""
        each = -(-whole.shape[0] // self.size)
        missing = each * self.size - whole.shape[0]
        flat = whole.reshape(whole.shape[0], -1)
        return F.pad(flat, (0, 0, 0, missing)).view(self.size, -1)

    # -- the way back ---------------------------------------------------------------------------

    def _own(self, name: str) -> Tensor:
        """My rows, flat, with zeros where there are fewer than on other ranks."""
        rows = self.rows[name]
        mine = self.held.parameters[name].detach()[rows.start : rows.stop].flatten()
        return F.pad(mine, (0, self._padded_shape(name).numel() - mine.numel()))

    def _padded_shape(self, name: str) -> torch.Size:
        whole = self.held.parameters[name].shape
        return torch.Size((-(-whole[0] // self.size), *whole[1:]))

    def _write_back(self, bucket: list[str], whole: Tensor) -> None:
        sizes = [self._padded_shape(name).numel() for name in bucket]
        for name, lines in zip(bucket, whole.split(sizes, dim=1), strict=True):
            parameter = self.held.parameters[name]
            shape = (-1, *parameter.shape[1:])
            parameter.detach().copy_(lines.reshape(shape)[: parameter.shape[0]])
