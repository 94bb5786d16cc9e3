"""A layer of experts, each called once."""

from collections.abc import Callable

import torch

Expert = Callable[[torch.Tensor], torch.Tensor]


def dispatch(
    x_TD: torch.Tensor, router_DE: torch.Tensor, experts: list[Expert], k: int
) -> torch.Tensor:
    """Sum over each token's k experts of weight * expert(x); an expert without tokens is not called."""
    # begin answer
    weight_TK, chosen_TK = torch.softmax(x_TD @ router_DE, -1).topk(k)
    weight_TK = weight_TK / weight_TK.sum(-1, keepdim=True)
    order_P = chosen_TK.flatten().argsort(stable=True)
    token_P = order_P // k
    lengths = chosen_TK.flatten().bincount(minlength=len(experts)).tolist()
    out_TD, begin = torch.zeros_like(x_TD), 0
    for expert, length in zip(experts, lengths, strict=True):
        end = begin + length
        if length:
            rows = token_P[begin:end]
            made = expert(x_TD[rows])
            out_TD.index_add_(0, rows, weight_TK.flatten()[order_P[begin:end]][:, None] * made)
        begin = end
    return out_TD
    # end answer
