"""The next tokens on a CPU: those of the reference of `kernels.sampling`, without work that no request asks for.

    temperature 0      the largest logit                                                     one pass
    no cut             score + noise only where it may exceed that of the likeliest token    two passes
    cut                noise only for what top-k, top-p and min-p leave                      one selection
    not a number       the reference itself; for vocabularies of a few thousand tokens as well, all rows at once

The reference sorts every row twice and draws noise for all of them, in float64: for a vocabulary of 150,000 tokens and
eight rows that takes longer than a small model does. What decides here is in float64 as well; float32 only leaves out
what cannot be chosen, with room for its rounding.
"""

import logging
import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.sampling.sampling import Parameters, sample

log = logging.getLogger("cairn")

WORD = 0xFFFFFFFF
SMALL = 4096  # a vocabulary for which what Python does between operations costs more than they do
HEAD = 1024  # likeliest tokens among which top-p is looked for
ROOM = 1.001  # how much float32 may be wrong
STEEPEST = 1e30  # 1 / temperature


class DrawParameters(NamedTuple):
    """Sampling parameters of one row."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    position: int


def sample_on_cpu(
    logits_SV: Tensor, parameters: Parameters, position_S: Tensor, *, rows_B: Tensor
) -> Tensor:
    """A token for each row of logits, [S] int32; `rows_B`: whose parameters, -1 for padding, which gets token 0."""
    rows_S = rows_B.clamp(min=0).long()
    likeliest_S = _likeliest(logits_SV)
    largest_S, tokens_S = logits_SV.gather(1, likeliest_S[:, None])[:, 0], likeliest_S.int()
    # Not a number, or nothing allowed: the reference knows what then.
    odd_S = ~largest_S.isfinite()
    if odd_S.any() and bool(largest_S[rows_B >= 0].isnan().any()):
        _warn_of_nan()
    drawn_S = (parameters.temperature_N[rows_S] > 0) & ~odd_S
    if logits_SV.shape[1] < SMALL:
        odd_S, drawn_S = odd_S | drawn_S, torch.zeros_like(drawn_S)
    for choose, wanted_S in ((sample, odd_S), (_draw_each, drawn_S)):
        if wanted_S.any():
            at_R = wanted_S.nonzero()[:, 0]
            own = Parameters(*(tensor[rows_S[at_R]] for tensor in parameters))
            tokens_S[at_R] = choose(logits_SV[at_R], own, position_S[at_R])
    return tokens_S.masked_fill_(rows_B < 0, 0)


def _likeliest(logits_SV: Tensor) -> Tensor:
    """Argmax with the reference's tie-breaking: the first of equals, NaN before all. NumPy is ten times as fast."""
    if logits_SV.dtype == torch.bfloat16:
        return logits_SV.max(dim=-1).indices
    return torch.from_numpy(logits_SV.numpy().argmax(-1))


@lru_cache(maxsize=1)  # once in a process
def _warn_of_nan() -> None:
    log.warning(
        "the model's logits are not numbers (NaN), so its answers mean nothing: are its weights damaged, or too large "
        "for --dtype? Compare the files with the original, or try --dtype float32"
    )


def _draw_each(logits_RV: Tensor, own: Parameters, position_R: Tensor) -> Tensor:
    each = map(DrawParameters, *(tensor.tolist() for tensor in (*own, position_R)))
    drawn = [_draw(row_V, how) for row_V, how in zip(logits_RV.float(), each, strict=True)]
    return torch.tensor(drawn, dtype=torch.int32)


def _draw(row_V: Tensor, how: DrawParameters) -> int:
    """The largest of score + noise among what is not cut off."""
    likeliest = int(row_V.numpy().argmax())
    coolness = min(1.0 / how.temperature, STEEPEST)
    below_V = (row_V - row_V[likeliest]).mul_(coolness)  # scores, the likeliest being 0
    if how.top_k or how.top_p < 1 or how.min_p:
        ids = _kept(row_V, below_V, likeliest, how)
        words = _words(_starts(len(row_V))[ids], how)
    else:
        words_V = _words(_starts(len(row_V)), how)
        ids = _rivals(below_V, words_V, likeliest)
        words = words_V[ids]
    scores = row_V.numpy()[ids].astype(np.float64) / how.temperature
    return int(ids[np.argmax(scores + _noise(words))])


# -- what can be drawn ---------------------------------------------------------------------------------


def _rivals(below_V: Tensor, words_V: np.ndarray, likeliest: int) -> np.ndarray:
    """Tokens that may have more than the likeliest one has with its noise.

    Noise is at most -log(v), v = (word + 1/2) / 2^32; so it takes v <= exp(score - what has to be exceeded).
    """
    goal = _noise(words_V[likeliest : likeliest + 1])[0]
    most_V = below_V.sub(goal).exp_().mul_(ROOM * 2**32).add_(1.0).numpy()
    return np.flatnonzero(words_V.astype(np.float32) <= most_V)


def _kept(row_V: Tensor, below_V: Tensor, likeliest: int, how: DrawParameters) -> np.ndarray:
    """Tokens that remain after top-k, top-p and min-p, in ascending order."""
    largest, whole = (
        row_V[likeliest],
        None,
    )  # of the softmax, if there is more in it than candidates
    if 0 < how.top_k < len(row_V):
        least = row_V.topk(how.top_k).values[-1]
        ids_R = (row_V >= least).nonzero()[:, 0]  # with all its equals
    elif how.top_p < 1:
        ids_R, whole = (
            row_V.topk(min(HEAD, len(row_V))).indices,
            _powers(row_V, largest, how).sum(),
        )
    else:
        ids_R = (below_V >= math.log((how.min_p or 1e-300) / ROOM)).nonzero()[:, 0]
    while True:
        weights_R, order_R = _powers(row_V[ids_R], largest, how).sort(descending=True)
        weights_R /= weights_R.sum() if whole is None else whole
        count = _stay(weights_R, how)
        if whole is None or count < len(ids_R) or len(ids_R) == len(row_V):
            return np.sort(ids_R[order_R[:count]].numpy())
        ids_R = torch.arange(len(row_V))  # so many share top-p that there may be more


def _stay(weights_R: Tensor, how: DrawParameters) -> int:
    """Number of leading (most likely) tokens that top-p and min-p keep; ties are kept or dropped together."""
    least = how.min_p * weights_R[0]
    if how.top_p < 1:
        before_R = weights_R.cumsum(0) - weights_R
        crossing = max(int((before_R < how.top_p).sum()), 1) - 1
        least = torch.maximum(least, weights_R[crossing])
    return int((weights_R >= least).sum())


def _powers(row_R: Tensor, largest: Tensor, how: DrawParameters) -> Tensor:
    """Exponentials of the softmax without normalisation."""
    return (row_R.double() - largest.double()).div_(how.temperature).exp_()


# -- noise, as `kernels.sampling_noise` defines it -----------------------------------------------------


@lru_cache(maxsize=4)
def _starts(vocabulary: int) -> np.ndarray:
    return np.arange(vocabulary, dtype=np.uint32) * np.uint32(0x9E3779B1)


def _key(seed: int, position: int) -> tuple[int, int]:
    x, y, z = (part * 1664525 + 1013904223 & WORD for part in (seed >> 32 & WORD, position, seed))
    for last in (False, True):
        x = x + y * z & WORD
        y = y + z * x & WORD
        z = z + x * y & WORD
        if not last:
            x, y, z = x ^ x >> 16, y ^ y >> 16, z ^ z >> 16
    return y, z


def _words(starts: np.ndarray, how: DrawParameters) -> np.ndarray:
    """A random word for each token, whose `starts` are given."""
    y, z = _key(how.seed, how.position)
    words = starts + np.uint32(y)
    words ^= words >> 15
    words ^= np.uint32(z)
    words *= np.uint32(0x7FEB352D)
    words ^= words >> 16
    words *= np.uint32(0x846CA68B)
    words ^= words >> 16
    return words


def _noise(words: np.ndarray) -> np.ndarray:
    return -np.log(-np.log1p(-(words.astype(np.float64) + 0.5) / 2**32))
