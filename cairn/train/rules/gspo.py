"""GSPO (arXiv:2507.18071): one ratio for a sequence, the geometric mean of its tokens', clipped as a whole."""

from torch import Tensor

from cairn.train.rules.kto import SequenceLoss
from cairn.train.rules.policy import Clip, clipped


class GSPO:
    def __init__(self, clip: Clip = Clip(3e-4, 4e-4)) -> None:  # noqa: B008 (immutable)
        self.clip = clip

    def __call__(
        self, logp_S: Tensor, old_S: Tensor, tokens_S: Tensor, advantage_S: Tensor
    ) -> SequenceLoss:
        """Sums over each sequence; the slope is that of each of its tokens."""
        loss_S, slope_S = clipped(logp_S / tokens_S, old_S / tokens_S, advantage_S, self.clip)
        return SequenceLoss(loss_S, slope_S / tokens_S)
