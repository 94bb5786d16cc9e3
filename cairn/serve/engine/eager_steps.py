"""Warm-up of kernels launched outside of graphs, so that they are compiled before the first request.

    large     many prompts at once: new sequences alone and any, few and many, numbers that 16 divides and does not
    special   penalties, masks of grammars, logit bias and log-probabilities, which are drawn behind a graph

Kernels are specialised for numbers that 16 divides, for one sequence, for powers of two above their number, and for so
many that none is cut into parts. What is launched never depends on values, so steps that are all padding will do.
"""

import torch

from cairn.kernels.sampling.logprobs import logprobs
from cairn.kernels.sampling.penalties import count, words
from cairn.kernels.sampling.sampling import sample
from cairn.serve.engine.batch import Layout
from cairn.serve.engine.cuda_graph import Shape, mixed_sizes, most_new_pages, token_sizes
from cairn.serve.engine.request import Limits
from cairn.serve.engine.sampler import Sampler, no_penalties

ODD = 5  # tokens less than a size
# Sequences of the smallest large step, besides as many as there can be.
SEQUENCES = (1, 2, 5, 9, 16, 31, 61, 64, 99)
TOP = (0, 1, 5, 20)  # likeliest tokens that requests ask for


def large_shapes(limits: Limits) -> list[Shape]:
    """Steps beyond those that have graphs in advance: of new sequences alone, and of any."""
    most = mixed_sizes(limits)[-1]
    sizes = [size for size in token_sizes(limits.step_tokens) if size > most]
    numbers = sorted({n for n in SEQUENCES if n < limits.rows} | {limits.rows})
    shapes = [(size, n) for size in sizes[:1] for n in numbers]
    shapes += [(size, n) for size in sizes[-1:] for n in (1, limits.rows)]
    layouts = {_layout(size - odd, n, limits) for size, n in shapes for odd in (0, ODD)}
    fitting = sorted(layout for layout in layouts if layout.sequences <= limits.rows)
    return [Shape(layout, fresh) for layout in fitting for fresh in (True, False)]


def _layout(tokens: int, sequences: int, limits: Limits) -> Layout:
    """Layout of a warm-up step whose sequences do not exceed the context length."""
    sequences = max(sequences, -(-tokens // limits.context))
    longest = -(-tokens // sequences)
    return Layout(sequences, tokens, most_new_pages(limits), sequences, max(2, longest))


def draw_special(sampler: Sampler, dtype: torch.dtype, rows: int) -> None:
    """Every special way to draw, for one request and for as many as there can be."""
    device, vocabulary = sampler.device, sampler.vocabulary
    penalties = no_penalties(rows, vocabulary, device)
    for batch in sorted({1, min(5, rows), rows}):
        logits_SV = torch.zeros(batch, vocabulary, dtype=dtype, device=device)
        rows_S = torch.full((batch,), -1, dtype=torch.int32, device=device)  # padding
        position_S = torch.zeros_like(rows_S)
        allowed_SW = torch.full((batch, words(vocabulary)), -1, dtype=torch.int32, device=device)
        for scores_SV in (logits_SV.float(), logits_SV):  # with a logit bias they are in float32
            for counted in (None, penalties):
                for mask in (None, allowed_SW):
                    tokens_S = sample(
                        scores_SV,
                        sampler.parameters,
                        position_S,
                        rows_B=rows_S,
                        penalties=counted,
                        allowed_BW=mask,
                    )
        count(penalties, tokens_S, rows_S)
        for n in TOP:
            logprobs(logits_SV, tokens_S, min(n, vocabulary))
