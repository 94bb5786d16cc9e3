"""What the first requests would otherwise wait for: kernels of steps that have no graph in advance.

    large steps       many prompts at once: run once for each kind, with numbers of tokens that 16 divides and does not
    special draws     penalties, masks of grammars, logit bias, log-probabilities: outside of graphs

Everything runs on padding, so nothing is written to the cache. A step for which there is no memory is passed over: it
would not be run either.
"""

from collections.abc import Callable

import torch

from cairn.core.events import instant, span
from cairn.kernels.sampling.logprobs import logprobs
from cairn.kernels.sampling.penalties import count, words
from cairn.kernels.sampling.sampling import sample
from cairn.serve.engine.batch import Layout
from cairn.serve.engine.cuda_graph import Shape, mixed_sizes, most_new_pages
from cairn.serve.engine.request import Limits
from cairn.serve.engine.sampler import Sampler, no_penalties

SEQUENCES = 8  # of a large step
ODD = 5  # tokens less than a power of two: kernels are specialised for numbers that 16 divides
TOP = (0, 1, 5)  # likeliest tokens that requests usually ask for


def large_shapes(limits: Limits) -> list[Shape]:
    """Steps beyond those that have graphs in advance: of new sequences alone and of others."""
    most = mixed_sizes(limits)[-1]
    sizes = [size for size in (limits.step_tokens, limits.step_tokens // 2) if size - ODD > most]
    made = []
    for place, size in enumerate(sizes):
        for fresh in (True, False):
            tokens = size - ODD if fresh == (place == 0) else size
            made.append(Shape(_layout(tokens, limits), fresh))
    return [shape for shape in made if shape.layout.sequences <= limits.rows]


def _layout(tokens: int, limits: Limits) -> Layout:
    """A few sequences, none longer than a request may be."""
    sequences = max(min(SEQUENCES, limits.rows), -(-tokens // limits.context))
    longest = -(-tokens // sequences)
    return Layout(sequences, tokens, most_new_pages(limits), sequences, max(2, longest))


def draw_special(sampler: Sampler, dtype: torch.dtype, rows: int) -> None:
    """Every special way to draw, for one request and for as many as there can be."""
    device, vocabulary = sampler.device, sampler.vocabulary
    penalties = no_penalties(1, vocabulary, device)
    for batch in sorted({1, rows}):
        logits_SV = torch.zeros(batch, vocabulary, dtype=dtype, device=device)
        rows_S = torch.full((batch,), -1, dtype=torch.int32, device=device)  # padding
        position_S = torch.zeros_like(rows_S)
        allowed_SW = torch.full((batch, words(vocabulary)), -1, dtype=torch.int32, device=device)
        scores_SV = logits_SV.float()
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


def run_or_pass(what: str, run: Callable[[], object]) -> None:
    """Without memory for it, the step would run in smaller pieces or not at all: no reason to stop."""
    with span("warm up", what=what):
        try:
            run()
        except torch.OutOfMemoryError as problem:
            instant("no warm-up", what=what, why=str(problem).splitlines()[0])
