"""Many tokens of one sequence through the gated delta rule, a chunk of them at a time.

What one token writes depends on what those before it in the chunk have written, which is a triangular system:

    (I + A) U = beta V,   (I + A) W = beta exp(G) K        A = strictly lower part of beta exp(G_i - G_j) k_i k_j
    new = U - W S                                          what the tokens write, S: the state before the chunk
    Y = exp(G) Q S + lower(exp(G_i - G_j) q_i k_j) new     G: running sum of g within the chunk
    S <- exp(G_last) S + (exp(G_last - G) K)^T new

So a chunk is a few products of matrices instead of 64 steps, each of which would read the state.
"""

import torch
from torch import Tensor

CHUNK = 64


def delta_chunk_reference(
    q_SHK: Tensor, k_SHK: Tensor, v_SHV: Tensor, g_SH: Tensor, beta_SH: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    """q and k of unit length, float32 -> y [S, H, V] and the state behind the last token."""
    outputs = []
    by_head = [x.transpose(0, 1) for x in (q_SHK, k_SHK, v_SHV, g_SH, beta_SH)]
    for start in range(0, len(q_SHK), CHUNK):
        q, k, v, g, beta = (x[:, start : start + CHUNK] for x in by_head)
        y_HNV, state_HKV = _chunk(q, k, v, g, beta, state_HKV)
        outputs.append(y_HNV)
    return torch.cat(outputs, dim=1).transpose(0, 1), state_HKV


def _chunk(
    q_HNK: Tensor, k_HNK: Tensor, v_HNV: Tensor, g_HN: Tensor, beta_HN: Tensor, state_HKV: Tensor
) -> tuple[Tensor, Tensor]:
    sums_HN = g_HN.cumsum(-1)
    # Of later tokens the difference is positive and may overflow: it is cut off before it is raised.
    fades_HNN = (sums_HN[..., :, None] - sums_HN[..., None, :]).tril().exp().tril()
    beta_HN1, grown_HN1 = beta_HN[..., None], sums_HN.exp()[..., None]
    system_HNN = beta_HN1 * (k_HNK @ k_HNK.transpose(-1, -2)) * fades_HNN
    right = torch.cat((beta_HN1 * v_HNV, beta_HN1 * grown_HN1 * k_HNK), dim=-1)
    solved = torch.linalg.solve_triangular(system_HNN, right, upper=False, unitriangular=True)
    u_HNV, w_HNK = solved.split((v_HNV.shape[-1], k_HNK.shape[-1]), dim=-1)
    new_HNV = u_HNV - w_HNK @ state_HKV
    scores_HNN = (q_HNK @ k_HNK.transpose(-1, -2)) * fades_HNN
    y_HNV = (grown_HN1 * q_HNK) @ state_HKV + scores_HNN @ new_HNV
    last_H1 = sums_HN[..., -1:]
    left_HNK = (last_H1 - sums_HN).exp()[..., None] * k_HNK
    state_HKV = state_HKV * last_H1.exp()[..., None] + left_HNK.transpose(-1, -2) @ new_HNV
    return y_HNV, state_HKV
