"""Shared parts of pairwise preference losses: summed log probabilities of two completions of a prompt.

    rule(chosen, rejected) -> loss_P, slope of the chosen, slope of the rejected      slope = d loss / d logp of a token

A loss of a sequence has one slope for all its tokens: that of the sum, or that of the mean divided by the tokens.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Completions(NamedTuple):
    """A completion of each prompt."""

    logp_P: Tensor  # summed over the completion's tokens, float32
    tokens_P: Tensor  # how many
    reference_P: Tensor  # the same sum of the reference model; zeros where a rule needs none

    @property
    def mean_P(self) -> Tensor:
        return self.logp_P / self.tokens_P

    @property
    def gain_P(self) -> Tensor:
        """Log ratio to the reference."""
        return self.logp_P - self.reference_P

    def reward_P(self, per_token: bool) -> Tensor:
        """Reward that a rule compares, without its scale."""
        return self.gain_P / self.tokens_P if per_token else self.gain_P


class PairLoss(NamedTuple):
    loss_P: Tensor
    chosen_P: Tensor  # slope of each token of the chosen completion
    rejected_P: Tensor


class PairRule(Protocol):
    @property
    def needs_reference(self) -> bool: ...

    @property
    def per_token(self) -> bool: ...  # whether it compares means over tokens, in place of sums

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss: ...
