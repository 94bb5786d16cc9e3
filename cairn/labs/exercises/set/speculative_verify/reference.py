"""Which proposed tokens stay, and the one that follows them."""

import torch


def verify(
    proposed: list[int],
    draft: torch.Tensor,  # [k, V] probabilities that the proposals were drawn from
    target: torch.Tensor,  # [k + 1, V] probabilities of the target
    accept_u: list[float],  # a uniform number for each proposal
    last_u: float,  # and one for the last token
) -> list[int]:
    """The accepted tokens, then one more: of the residual after a rejection, of the target otherwise."""
    # begin answer
    accepted: list[int] = []
    for at, token in enumerate(proposed):
        if accept_u[at] >= float(target[at][token]) / max(float(draft[at][token]), 1e-30):
            residual = (target[at] - draft[at]).clamp(min=0)
            return [*accepted, _draw(residual / residual.sum(), last_u)]
        accepted.append(token)
    return [*accepted, _draw(target[len(proposed)], last_u)]
    # end answer


def _draw(probs: torch.Tensor, u: float) -> int:
    """The token that u chooses."""
    index = int((probs.cumsum(0) <= u).sum())
    return min(index, int(probs.nonzero()[-1]))
