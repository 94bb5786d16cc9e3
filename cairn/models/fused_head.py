"""An EAGLE-3 head through the kernels that serve on a GPU; `models.eagle` has the form to read first.

    norm x and g | q, k, v | rotate, write to pages | attend | out | add + norm | gate, up, SwiGLU | down | add + norm

A head passes over its own guesses one after another, so at small batches its launches count as much as its weights.
"""

from typing import cast

import torch
from torch import Tensor

from cairn.kernels.quantize.quantize import Quantized, quantize
from cairn.kernels.sampling.sampling import Parameters, sample
from cairn.models.attend import Attend
from cairn.models.eagle import DraftPass, EagleHead
from cairn.models.fused import FusedInput, FusedResidual, FusedStep, Tables, heads_of, normed
from cairn.models.layers import FeedForward, Norm
from cairn.models.linear.form import Epilogue, Kernels
from cairn.models.transformer import rotations_of


class FusedHead:
    """`EagleHead` with the same calls, without gradients."""

    def __init__(self, head: EagleHead, context: int, rows: int, invariant: bool = False) -> None:
        """`context`: positions that the rotations are tabulated for. `rows`: most that are guessed for at once."""
        self.head, self.kernels = head, Kernels(invariant=invariant)
        self.mixer, spec = head.layer.attention, head.spec.layer
        device = head.norm.weight.device
        self.tables = Tables({self.mixer.rope}, spec, context, device)
        self.heads = {self.mixer: heads_of(self.mixer, spec)}
        self._greedy = Parameters.neutral(1, device)
        self._none = torch.zeros(rows, dtype=torch.int32, device=device)
        kept_K = torch.arange(len(head.d2t), device=device)
        self.token_K = (kept_K + head.d2t).int()  # of the target's vocabulary

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        entering_TE = torch.cat(tapped, -1)
        return cast(Tensor, self.head.fc.product(entering_TE, Epilogue(kernels=self.kernels)))

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        ends_B: Tensor | None = None,
    ) -> DraftPass:
        """Overwrites `g_TD`."""
        head, layer = self.head, self.head.layer
        rotations = {}
        if not self.mixer.has_fused:
            rotations = rotations_of(head.spec.layer, range(1), positions_T, attend, x_TD.dtype)
        step = FusedStep(self, attend, rotations)
        normed_TD = normed(g_TD, head.hidden_norm)
        both_TD = torch.cat((normed(x_TD, cast(Norm, layer.attention_norm)), normed_TD), -1)
        residual_TD = normed_TD if head.spec.norm_before_residual else g_TD
        x = self._attended(BothNormed(both_TD, residual_TD), step, ends_B)
        x = x.normed(cast(Norm, layer.feed_forward_norm))
        x = x.add(cast(FeedForward, layer.feed_forward).fused(x, step)).normed(head.norm)
        last_TD = x.tensor  # adds what is pending to the residual
        return DraftPass(x.x_TD, last_TD)

    def _attended(self, x: "BothNormed", step: FusedStep, ends_B: Tensor | None) -> FusedResidual:
        """Every token leaves its key and value; only those at `ends_B` go on."""
        if ends_B is None or not self.mixer.has_fused:
            residual = x.add(self.mixer.fused(x, step))
            return residual if ends_B is None else FusedResidual(residual.hidden()[ends_B])
        y_TN = step.attended(self.mixer, step.columns(self.mixer.qkv, cast(FusedInput, x)))
        residual_BD = x.onto[ends_B]
        return FusedResidual(residual_BD, step.rows(self.mixer.out, y_TN[ends_B], residual_BD))

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        scores_TV = self.head.head.logits(normed_TD, Epilogue(kernels=self.kernels))
        none_T = self._none[: len(scores_TV)]
        return self.token_K[sample(scores_TV, self._greedy, none_T, rows_B=none_T)]


class BothNormed:
    """The token and the hidden state, normed and side by side: what the head's attention starts from."""

    def __init__(self, both_TE: Tensor, residual_TD: Tensor) -> None:
        self.x_TD, self.onto = both_TE, residual_TD

    @property
    def tensor(self) -> Tensor:
        return self.x_TD

    @property
    def quantized(self) -> Quantized:
        return quantize(self.x_TD)

    def add(self, y_TD: object) -> FusedResidual:
        return FusedResidual(self.onto, y_TD)  # type: ignore[arg-type]
