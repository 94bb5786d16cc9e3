"""The next tokens on a CPU: what the reference of `kernels.sampling` chooses, at the price of what was asked for.

    temperature 0      the largest logit                       one pass
    no cut             the largest of score + noise            no sort
    else               the reference itself, for these rows only

The reference sorts every row twice and draws noise for all of them, in float64: on a CPU more work than a small model.
"""

from torch import Tensor

from cairn.kernels.sampling import Parameters, sample
from cairn.kernels.sampling_noise import noise_reference


def sample_on_cpu(
    logits_SV: Tensor, parameters: Parameters, position_S: Tensor, *, rows_B: Tensor
) -> Tensor:
    """A token for each row of logits, [S] int32; `rows_B`: whose parameters, -1 for padding, which gets token 0."""
    rows_S = rows_B.clamp(min=0).long()
    largest = logits_SV.max(dim=-1)  # of equals the first, as the reference has it
    tokens_S = largest.indices.int()
    odd_S = (
        ~largest.values.isfinite()
    )  # not a number, or nothing allowed: the reference knows what then
    drawn_S = (parameters.temperature_N[rows_S] > 0) & ~odd_S
    if (drawn_S | odd_S).any():
        mine = Parameters(*(tensor[rows_S] for tensor in parameters))
        cut_S = (mine.top_k_N > 0) | (mine.top_p_N < 1) | (mine.min_p_N > 0)
        for rows_R, choose in ((drawn_S & ~cut_S, _uncut), (drawn_S & cut_S | odd_S, sample)):
            at_R = rows_R.nonzero()[:, 0]
            if len(at_R):
                own = Parameters(*(tensor[at_R] for tensor in mine))
                tokens_S[at_R] = choose(logits_SV[at_R], own, position_S[at_R])
    return tokens_S.masked_fill_(rows_B < 0, 0)


def _uncut(logits_RV: Tensor, own: Parameters, position_R: Tensor) -> Tensor:
    scores_RV = logits_RV.double() / own.temperature_N.double()[:, None]
    noise_RV = noise_reference(own.seed_N, position_R, logits_RV.shape[1])
    return (scores_RV + noise_RV).max(dim=-1).indices.int()
