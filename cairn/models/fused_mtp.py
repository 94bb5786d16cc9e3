"""A layer that predicts further tokens, through the kernels that serve on a GPU; read `models.mtp` first."""

import torch
from torch import Tensor

from cairn.kernels.sampling.sampling import Parameters, sample
from cairn.models.attend import Attend
from cairn.models.attention import Attention, joined_attentions
from cairn.models.eagle import DraftPass
from cairn.models.fused import FusedResidual, FusedStep, Tables, heads_of
from cairn.models.linear.form import Kernels
from cairn.models.mtp import MtpHead


class FusedMtp:
    """`MtpHead` with the same calls, without gradients: its layer runs as those of the model do."""

    def __init__(self, head: MtpHead, context: int, rows: int, invariant: bool = False) -> None:
        """The arguments are those of `FusedHead`."""
        self.head, self.kernels = head, Kernels(invariant=invariant)
        self.mixers: list[Attention] = list(joined_attentions(head))
        device, spec = head.norm.weight.device, head.spec
        self.tables = Tables({mixer.rope for mixer in self.mixers}, spec, context, device)
        self.heads = {mixer: heads_of(mixer, spec) for mixer in self.mixers}
        self._greedy = Parameters.neutral(1, device)
        self._none = torch.zeros(rows, dtype=torch.int32, device=device)

    def fuse(self, tapped: list[Tensor]) -> Tensor:
        return self.head.fuse(tapped)

    def passed(
        self,
        x_TD: Tensor,
        g_TD: Tensor,
        positions_T: Tensor,
        attend: Attend,
        ends_B: Tensor | None = None,
    ) -> DraftPass:
        rotations = {}
        if not self.mixers:  # latent attention, and gates of the output
            rotations = self.head.rotations(positions_T, attend, x_TD.dtype)
        return self.head.through(
            x_TD, g_TD, FusedStep(self, attend, rotations), FusedResidual, ends_B
        )

    def likeliest(self, normed_TD: Tensor) -> Tensor:
        assert self.head.scores is not None
        scores_TV = self.head.scores(normed_TD)
        none_T = self._none[: len(scores_TV)]
        return sample(scores_TV, self._greedy, none_T, rows_B=none_T)
