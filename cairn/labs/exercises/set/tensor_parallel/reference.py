"""y = relu(x U^T + a) D^T + b over ranks; ranks are parts of a list."""

import torch


def feed_forward(
    x_TD: torch.Tensor,
    up_HD: torch.Tensor,
    up_bias_H: torch.Tensor,
    down_DH: torch.Tensor,
    down_bias_D: torch.Tensor,
    ranks: int,
) -> torch.Tensor:
    """Each rank holds 1/ranks of both weights; partial results are summed once."""
    # begin answer
    ups, biases = up_HD.chunk(ranks), up_bias_H.chunk(ranks)
    downs = down_DH.chunk(ranks, dim=1)
    partial = []
    for up, bias, down in zip(ups, biases, downs, strict=True):
        hidden = torch.relu(x_TD @ up.T + bias)
        partial.append(hidden @ down.T)
    return torch.stack(partial).sum(0) + down_bias_D
    # end answer
