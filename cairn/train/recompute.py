"""Activation recomputation in backward, which trades time for memory.

    none        every operation keeps what its gradient needs
    selective   products and attention keep their results; norms, activations and rotations are computed again
    full        a layer keeps its input only; all of it is computed again: a third more work, the least memory

For the plain form, by torch's own checkpointing; it takes `norms` for selective. The fused form has kinds of its own,
see `fused_forward`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from cairn.models.attend import Attend
from cairn.models.layer_loop import PlainStep
from cairn.models.rope import Rotation
from cairn.models.spec import Rope
from cairn.train.offload import Offload
from cairn.train.parallel.pipeline.deferred import Deferred, deferring
from cairn.train.recompute_kinds import Recompute

Context = AbstractContextManager[Any]
_ATEN = torch.ops.aten
# Costly to compute again; everything else is not.
KEPT = frozenset(
    getattr(_ATEN, name).default
    for name in (
        "mm",
        "addmm",
        "bmm",
        "_scaled_mm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_ATEN, name)
)


class RecomputingStep(PlainStep):
    """The plain form with layers that forget."""

    def __init__(
        self,
        attend: Attend,
        rotations: dict[Rope, Rotation],
        kind: Recompute,
        deferred: Deferred | None = None,
        offload: Offload | None = None,
    ) -> None:
        """`deferred`: where weight gradients go that are computed later. `offload`: what layers keep may wait there."""
        super().__init__(attend, rotations)
        self.kind, self.deferred, self.offload = kind, deferred, offload

    def run(self, layer: Any, residual: Any) -> Any:
        if self.offload is not None:
            return self.offload.run(layer, lambda: layer(residual, self))
        if self.kind == "none":
            return layer(residual, self)
        return checkpoint(
            layer,
            residual,
            self,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._contexts,
        )

    def _contexts(self) -> tuple[Context, Context]:
        """Around the first and the second time, which has to run as the first did, deferring included."""
        first: Context = nullcontext()
        second: Context = nullcontext()
        if self.kind != "full":
            first, second = create_selective_checkpoint_contexts(list(KEPT))
        return first, _nested(second, deferring(self.deferred))


@contextmanager
def _nested(outer: Context, inner: Context) -> Iterator[None]:
    with outer, inner:
        yield
