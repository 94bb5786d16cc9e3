"""An EAGLE-3 head through the kernels that serve on a GPU; `models.eagle` has the form to read first.

    norm x and g | q, k, v | rotate, write to pages | attend | out | add + norm | gate, up, SwiGLU | down | add + norm

A head passes over its own guesses one after another, so at small batches its launches count as much as its weights.
"""

from typing import cast

import torch
from torch import Tensor

from cairn.models.attend import Attend
from cairn.models.eagle import EagleHead, Passed
from cairn.models.fused import FusedResidual, FusedStep, Tables, heads_of, normed
from cairn.models.layers import FeedForward, Norm
from cairn.models.linear.form import Epilogue, Kernels
from cairn.models.transformer import rotations_of


class FusedHead:
    """`EagleHead` with the same calls, without gradients."""

    def __init__(self, head: EagleHead, context: int, invariant: bool = False) -> None:
        """`context`: positions that the rotations are tabulated for."""
        self.head, self.kernels = head, Kernels(invariant=invariant)
        self.mixer, spec = head.layer.attention, head.spec.layer
        device = head.norm.weight.device
        self.tables = Tables({self.mixer.rope}, spec, context, device)
        self.heads = {self.mixer: heads_of(self.mixer, spec)}

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        entering_TE = torch.cat(tapped, -1)
        return cast(Tensor, self.head.fc.product(entering_TE, Epilogue(kernels=self.kernels)))

    def passed(self, x_TD: Tensor, g_TD: Tensor, positions_T: Tensor, attend: Attend) -> Passed:
        """Overwrites `g_TD`."""
        head, layer = self.head, self.head.layer
        rotations = {}
        if not self.mixer.has_fused:
            rotations = rotations_of(head.spec.layer, range(1), positions_T, attend, x_TD.dtype)
        step = FusedStep(self, attend, rotations)
        normed_TD = normed(g_TD, head.hidden_norm)
        both_TD = torch.cat((normed(x_TD, cast(Norm, layer.attention_norm)), normed_TD), -1)
        residual_TD = normed_TD if head.spec.norm_before_residual else g_TD
        x = BothNormed(both_TD, residual_TD)
        x = x.add(self.mixer.fused(x, step)).normed(cast(Norm, layer.feed_forward_norm))
        x = x.add(cast(FeedForward, layer.feed_forward).fused(x, step)).normed(head.norm)
        last_TD = x.tensor  # adds what is pending to the residual
        return Passed(x.x_TD, last_TD)

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        scores_TV = self.head.head.logits(normed_TD, Epilogue(kernels=self.kernels))
        return self.head.token_of(scores_TV.argmax(-1))


class BothNormed:
    """The token and the hidden state, normed and side by side: what the head's attention starts from."""

    def __init__(self, both_TE: Tensor, residual_TD: Tensor) -> None:
        self.x_TD, self.onto = both_TE, residual_TD

    @property
    def tensor(self) -> Tensor:
        return self.x_TD

    def add(self, y_TD: object) -> FusedResidual:
        return FusedResidual(self.onto, y_TD)  # type: ignore[arg-type]
