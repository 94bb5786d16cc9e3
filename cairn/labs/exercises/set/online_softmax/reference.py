"""State of a softmax-weighted sum: (m, l, o), the maximum, the sum of exp(s - m), the unnormalised output."""

import math

import torch

State = tuple[float, float, torch.Tensor]


def attend(scores_K: torch.Tensor, values_KD: torch.Tensor, block_length: int) -> State:
    """The state of softmax(scores) @ values, read in blocks of `block_length` keys; scores may be -inf."""
    # begin answer
    maximum, total = -math.inf, 0.0
    output_D = torch.zeros(values_KD.shape[1])
    for begin in range(0, len(scores_K), block_length):
        block = slice(begin, begin + block_length)
        highest = max(maximum, float(scores_K[block].max()))
        shift = highest if highest > -math.inf else 0.0
        weights_K = torch.exp(scores_K[block] - shift)
        scale = math.exp(maximum - shift)
        total = total * scale + weights_K.sum()
        output_D = output_D * scale + weights_K @ values_KD[block]
        maximum = highest
    return maximum, float(total), output_D
    # end answer


def merge(one: State, other: State) -> State:
    """The state over the keys of both."""
    # begin answer
    (m1, l1, o1_D), (m2, l2, o2_D) = one, other
    m = max(m1, m2)
    shift = m if m > -math.inf else 0.0
    a, b = math.exp(m1 - shift), math.exp(m2 - shift)
    return m, l1 * a + l2 * b, o1_D * a + o2_D * b
    # end answer


def finish(state: State) -> torch.Tensor:
    """softmax(scores) @ values; zeros where every score was -inf."""
    # begin answer
    _, total, output_D = state
    return output_D / total if total > 0 else output_D
    # end answer
