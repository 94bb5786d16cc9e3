"""From logits to a token."""

import torch


def distribution(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """Probabilities that are sampled from; top_k 0, top_p 1 and min_p 0 switch a filter off."""
    # begin answer
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).float()
    probs = torch.softmax(logits / temperature, -1)
    if 0 < top_k < len(logits):
        floor = probs.topk(top_k).values[-1]
        probs = torch.where(probs >= floor, probs, 0.0)
        probs = probs / probs.sum()
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        in_nucleus = before < top_p
        probs = torch.zeros_like(probs).scatter(0, order[in_nucleus], ordered[in_nucleus])
        probs = probs / probs.sum()
    if min_p > 0:
        probs = torch.where(probs >= min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()
    # end answer


def draw(probs: torch.Tensor, u: float) -> int:
    """The token that a uniform number u in [0, 1) chooses."""
    # begin answer
    index = int((probs.cumsum(0) <= u).sum())
    return min(index, int(probs.nonzero()[-1]))
    # end answer
