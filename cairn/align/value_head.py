"""Value head of PPO: expected returns per token, and the resulting advantages.

    value     V(t) = w h(t) + b of the hidden state that predicts token t          trained beside the policy
    credit    rewards come at the end; GAE spreads them over the tokens (arXiv:1506.02438), whitened over a round

The head has an optimizer of its own. Its gradient reaches the layers, too, by `value_weight`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cairn.kernels.loss.token_rule import applied, with_slope
from cairn.models.linear.maps import Vocabulary
from cairn.train.data.batch import IGNORED, Batch, Document
from cairn.train.precision import LossScale
from cairn.train.rules.advantages import gae, whitened
from cairn.train.rules.value import value_loss

if TYPE_CHECKING:
    from cairn.align.config import Algorithm

VALUE, RETURN = (
    "value",
    "return",
)  # streams: what the head said of a token before the update, what it should have said


class ValueHead:
    """Linear value head: one number for each hidden state."""

    def __init__(self, width: int, algorithm: "Algorithm", device: torch.device | str) -> None:
        self.algorithm = algorithm
        self.weight_D = torch.zeros(width, device=device, requires_grad=True)
        self.bias = torch.zeros((), device=device, requires_grad=True)
        self.parameters = [self.weight_D, self.bias]
        self.optimizer = torch.optim.Adam(self.parameters, lr=algorithm.value_lr)

    def __call__(
        self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch
    ) -> dict[str, Tensor]:
        """A `TokenHead`: the value of every token."""
        return {VALUE: hidden_TD.float() @ self.weight_D + self.bias}

    def loss(self, hidden_TD: Tensor, vocabulary: Vocabulary, batch: Batch) -> Tensor:
        """Summed over the tokens of a microbatch by their weights, with gradients."""
        value_T = self(hidden_TD, vocabulary, batch)[VALUE]
        old_T, return_T = batch.extra[VALUE], batch.extra[RETURN]
        loss_T, slope_T = applied(
            lambda x_T, _: value_loss(x_T, old_T, return_T),
            value_T,
            batch.targets_T != IGNORED,
            slice(None),
        )
        weight_T = self.algorithm.value_weight * batch.extra["weight"]
        return with_slope(value_T, weight_T * loss_T, weight_T * slope_T).sum()

    def step(self, max_norm: float, scale: LossScale, vetoed: bool = False) -> None:
        """Learns from the gradients of the training step before, if there was one to learn from."""
        gradients = self._gradients()
        if gradients and not vetoed:
            for gradient in gradients:
                gradient.div_(scale.factor())
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, max_norm or torch.inf)
            if bool(norm.isfinite()):
                self.optimizer.step()
        self.optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """State including the optimizer's averages, and the pending gradient if it is finite."""
        gradients = self._gradients()
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        averages = self.optimizer.state_dict()["state"]
        return {
            "weight": self.weight_D.tolist(),
            "bias": self.bias.item(),
            "averages": [
                {name: value.tolist() for name, value in averages[at].items()}
                for at in sorted(averages)
            ],
            "gradients": [gradient.tolist() for gradient in gradients] if finite else [],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weight_D.copy_(torch.tensor(state["weight"]))
        self.bias.fill_(state["bias"])
        averages = {
            at: {name: torch.tensor(value) for name, value in saved.items()}
            for at, saved in enumerate(state.get("averages", ()))
        }
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": averages})
        self.optimizer.zero_grad()
        for parameter, saved in zip(self.parameters, state.get("gradients", ()), strict=False):
            parameter.grad = torch.tensor(saved, device=parameter.device)

    def _gradients(self) -> list[Tensor]:
        return [one.grad for one in self.parameters if one.grad is not None]


def with_credit(
    documents: Sequence[Document],
    rewards: Sequence[float],
    values: Sequence[Tensor],
    lam: float,
) -> list[Document]:
    """Each answer with the advantage, the return and the old value of its tokens. `values`: of all its tokens."""
    places = [document.targets_T != IGNORED for document in documents]
    credits = []
    for reward, values_T, place_T in zip(rewards, values, places, strict=True):
        own_T = values_T[place_T].float().cpu()
        rewards_T = torch.zeros_like(own_T)
        rewards_T[-1] = reward
        credits.append((own_T, *gae(rewards_T, own_T, lam=lam)))
    advantages = whitened(torch.cat([advantage_T for _, advantage_T, _ in credits]))
    shares = advantages.split([len(own_T) for own_T, _, _ in credits])
    credited = []
    for document, place_T, (own_T, _, return_T), advantage_T in zip(
        documents, places, credits, shares, strict=True
    ):
        streams = {"advantage": advantage_T, VALUE: own_T, RETURN: return_T}
        placed = {name: _placed(place_T, stream_T) for name, stream_T in streams.items()}
        credited.append(document._replace(extra={**document.extra, **placed}))
    return credited


def _placed(place_T: Tensor, values_N: Tensor) -> Tensor:
    made_T = torch.zeros(len(place_T))
    made_T[place_T] = values_N
    return made_T
