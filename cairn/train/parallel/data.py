"""Data parallel: every rank the whole model and other samples; gradients are summed over the ranks.

Sums, not means: the loss is divided by the valid tokens of all ranks already. Buckets leave during the last backward.
With one rank in the group it is the plain single process. `zero` and `fsdp` offer the same (`Sync`), and differ in
what each rank keeps.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cairn.train.parallel.buckets import BYTES, Buckets
from cairn.train.parallel.gradients import Gradients
from cairn.train.parallel.mesh import Group
from cairn.train.parallel.rows import Rows


class Sync(Protocol):
    """Synchronisation of gradients between ranks with the same weights."""

    copies: int  # ranks that have the same gradient afterwards
    rows: dict[str, Rows]  # of a parameter, those that this rank updates; no entry: all

    def begin(self, microbatches: int) -> None:
        """Prepare a step with this number of backward passes (0: no gradients); weights are up to date afterwards."""
        ...

    def after_forward(self) -> None:
        """Release gathered weights after a pass without gradients."""
        ...

    def before_backward(self, last: bool) -> None:
        """`last`: no other backward of this step follows, and the gradients may leave during it."""
        ...

    def before_backward_of(self, chunk: int, last: bool) -> None:
        """The same for one stage of several that finish one by one."""
        ...

    def after_backward(self) -> None: ...

    def finish(self) -> None:
        """Finish after the last backward; `gradients` are then sums over all ranks."""
        ...

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank updates."""
        ...

    def gradients(self) -> dict[str, Tensor]: ...

    def zero_grad(self) -> None: ...


class Replicas:
    """The same weights and in the end the same gradients on every rank of a group."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: Group,
        bucket_bytes: int = BYTES,
        wide: bool = True,
    ) -> None:
        """`wide`: gradients of 16 bits of several microbatches are added in float32, also by one process."""
        self.group, self.wide = group, wide
        self._adds = False
        self.copies = 1 if group is None else dist.get_world_size(group)
        self.rows: dict[str, Rows] = {}
        self.held = Gradients(parameters)
        watched = {} if group is None else self.held.parameters
        self.buckets = Buckets(watched, self._launch, bucket_bytes)
        self._flying: list[tuple[list[str], Tensor, Any]] = []

    def begin(self, microbatches: int) -> None:
        self._adds = self.group is not None or (self.wide and microbatches > 1)

    def after_forward(self) -> None:
        pass

    def before_backward(self, last: bool) -> None:
        if last and self.group is not None:
            self.buckets.arm()

    def before_backward_of(self, chunk: int, last: bool) -> None:
        pass

    def after_backward(self) -> None:
        if self._adds and not self._flying:  # what is on its way already is complete
            self.held.collect()

    def finish(self) -> None:
        if self.group is None:
            return
        self.buckets.flush()
        for bucket, flat, handle in self._flying:
            handle.wait()
            sizes = [self.held.parameters[name].numel() for name in bucket]
            for name, part in zip(bucket, flat.split(sizes), strict=True):
                self.held.put(name, part.view_as(self.held.parameters[name]))
        self._flying.clear()

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.held.parameters

    def gradients(self) -> dict[str, Tensor]:
        return self.held.found()

    def zero_grad(self) -> None:
        self.held.clear()

    def _launch(self, bucket: list[str]) -> None:
        self.held.collect()
        flat = torch.cat([self.held.or_zeros(name).flatten() for name in bucket])
        for name in bucket:
            self.held.put(name, None)  # comes back as a part of `flat`: once in memory until then
        handle = dist.all_reduce(flat, group=self.group, async_op=True)
        self._flying.append((bucket, flat, handle))
