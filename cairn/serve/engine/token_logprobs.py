"""Log-probabilities as the host reads them: of tokens that were drawn, and of prompts.

    chunks of a step  ->  PromptRows: rows of the hidden states and the tokens behind them, all chunks together
    what comes back   ->  PromptLogprobs of each request

A chunk alone has too few rows for a fast product with the vocabulary, and its own copy to the device would wait for all
that was launched before. Knows nothing of devices.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from cairn.kernels.sampling.logprobs import LogProbs
from cairn.serve.engine.request import Request
from cairn.serve.engine.step import Chunk


class TokenLogprobs(NamedTuple):
    """Log probability of a token, and those of the most likely tokens."""

    logprob: float
    top: list[tuple[int, float]]  # token, log-probability; the likeliest first


class PromptLogprobs(NamedTuple):
    """Log probabilities of a chunk's prompt tokens, which begin after `start`."""

    start: int
    found: list[TokenLogprobs]


class PromptRows(NamedTuple):
    """Rows of a step's hidden states, the tokens that follow them, and which requests want to know about those."""

    top: int  # how many likeliest tokens are wanted with each
    rows: list[int]
    following: list[int]
    positions: list[int]  # of the rows' own tokens
    parts: list[tuple[Request, int, int]]  # how many came before, and how many there are

    def split(self, entries: Sequence[TokenLogprobs]) -> dict[Request, PromptLogprobs]:
        split, at = {}, 0
        for request, start, count in self.parts:
            split[request] = PromptLogprobs(start, [*entries[at : at + count]])
            at += count
        return split


def prompt_rows(chunks: Iterable[Chunk]) -> list[PromptRows]:
    """Rows grouped by the requested number of most likely tokens."""
    by_top: dict[int, PromptRows] = {}
    at = 0
    for chunk in chunks:
        top = chunk.request.params.prompt_logprobs
        if top is not None:
            _add(by_top.setdefault(top, PromptRows(top, [], [], [], [])), chunk, at)
        at += chunk.count
    return [one for one in by_top.values() if one.rows]


def _add(to: PromptRows, chunk: Chunk, at: int) -> None:
    """`at`: the row of the chunk's first token."""
    request = chunk.request
    least = max(request.scored_from, 1)  # nothing says how likely the first token is
    first = max(chunk.start + 1, least)
    following = request.prompt[first : chunk.start + chunk.count + 1]
    if following:
        skipped = first - 1 - chunk.start
        to.rows.extend(range(at + skipped, at + skipped + len(following)))
        to.following.extend(following)
        to.positions.extend(range(first - 1, first - 1 + len(following)))
        to.parts.append((request, first - least, len(following)))


def on_host(logprobs: LogProbs) -> list[TokenLogprobs]:
    lists = (part.tolist() for part in (logprobs.token_B, logprobs.ids_Bn, logprobs.top_Bn))
    return [
        TokenLogprobs(own, list(zip(ids, tops, strict=True)))
        for own, ids, tops in zip(*lists, strict=True)
    ]


def shortened(entry: TokenLogprobs, top: int) -> TokenLogprobs:
    """The step computed as many as its most demanding request wanted."""
    return entry if len(entry.top) <= top else entry._replace(top=entry.top[:top])
