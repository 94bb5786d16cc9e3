"""CISPO (arXiv:2506.13585): the clipped ratio is a weight without a gradient, so that every token keeps pushing."""

from torch import Tensor

from cairn.train.objective import Streams
from cairn.train.rules.kl import Estimator
from cairn.train.rules.policy import ratio, with_extras


class CISPO:
    z_loss = 0.0
    is_cross_entropy = False

    def __init__(self, largest: float = 5.0, kl: float = 0.0, estimator: Estimator = "k3") -> None:
        self.largest, self.kl, self.estimator = largest, kl, estimator

    def __call__(self, logp_T: Tensor, streams: Streams) -> tuple[Tensor, Tensor]:
        pull_T = -ratio(logp_T, streams["old"]).clamp(max=self.largest) * streams["advantage"]
        return with_extras(pull_T * logp_T, pull_T, logp_T, streams, self.kl, self.estimator)
