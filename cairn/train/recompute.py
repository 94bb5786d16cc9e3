"""What backward computes again instead of remembering it: memory for time.

    none        every operation keeps what its gradient needs
    selective   products and attention keep their results; norms, activations and rotations are computed again
    full        a layer keeps its input only; all of it is computed again: a third more work, the least memory

For the plain form, by torch's own checkpointing; it takes `norms` for selective. The fused form has kinds of its own,
see `fused_forward`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cairn.models.attend import Attend
from cairn.models.transformer import Transformer
from cairn.train.recompute_kinds import Recompute

_ATEN = torch.ops.aten
# Costly to compute again; everything else is not.
KEPT = frozenset(
    getattr(_ATEN, name).default
    for name in (
        "mm", "addmm", "bmm", "_scaled_mm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(_ATEN, name)
)  # fmt: skip


def recomputing(model: Transformer, kind: Recompute) -> Callable[[Tensor, Tensor, Attend], Tensor]:
    """The model's forward with layers that forget."""
    if kind == "none":
        return model
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if kind != "full":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def forward(tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        x_TD = model.embed(tokens_T, positions_T)
        rotations = model.rotations(positions_T, attend, x_TD.dtype)
        for i, layer in enumerate(model.layers):
            rotate = rotations.get(model.spec.rope_of(i))
            x_TD = checkpoint(layer, x_TD, rotate, attend, **options)
        return model.norm(x_TD)

    return forward


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
