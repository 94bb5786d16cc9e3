"""Attention over a sequence that is cut into one block for each rank."""

import torch


def attend(
    q_TD: torch.Tensor, k_SD: torch.Tensor, v_SD: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp of the scores) of one block of queries over one block of keys."""
    scores_TS = q_TD @ k_SD.T * q_TD.shape[1] ** -0.5
    if causal:
        later = torch.ones_like(scores_TS, dtype=torch.bool).triu(1)
        scores_TS = scores_TS.masked_fill(later, -torch.inf)
    lse_T = scores_TS.logsumexp(-1)
    return (scores_TS - lse_T[:, None]).exp() @ v_SD, lse_T


def ring_attention(
    q: list[torch.Tensor], k: list[torch.Tensor], v: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Causal attention; entry i of each list is what rank i holds, and of the result what it computed."""
    # begin answer
    n, outputs = len(q), []
    for rank in range(n):
        out, lse = attend(q[rank], k[rank], v[rank], causal=True)
        for r in range(1, n):
            source = (rank - r) % n
            if source > rank:
                continue
            part, part_lse = attend(q[rank], k[source], v[source], causal=False)
            new = torch.logaddexp(lse, part_lse)
            out = out * (lse - new).exp()[:, None] + part * (part_lse - new).exp()[:, None]
            lse = new
        outputs.append(out)
    return outputs
    # end answer
