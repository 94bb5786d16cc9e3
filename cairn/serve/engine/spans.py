"""Effects of media pieces on attention and RoPE: pure functions of a request, and arrays for a step.

    whole spans   tokens that see each other both ways are computed in one step: a chunk does not end inside
    reach         of tokens that see more than what stands before them, the first position that they do not see
    axes          frame, row and column of each token, by which a decoder with sections rotates

Text has one number on all axes; a picture of h x w rows begins at the next number p and lies at (p, p + row,
p + column); the steps of a video lie at (p + step, p + row, p + column). The text behind goes on above the largest.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from cairn.serve.engine.pieces import Piece
    from cairn.serve.engine.request import Request
    from cairn.serve.engine.step import Chunk


def whole_spans(request: "Request") -> list[tuple[int, int]]:
    """Spans of the prompt whose tokens see each other both ways, in order."""
    if any(piece.sees == "prompt" for piece in request.pieces):
        return [(0, len(request.prompt))]
    return [(piece.start, piece.end) for piece in request.pieces if piece.sees == "piece"]


def whole_end(request: "Request", start: int, end: int) -> int:
    """Adjust the end of a chunk so that it does not split a bidirectional span."""
    for first, last in whole_spans(request):
        if first < end < last:
            return first if first > start else last
    return end


def longest_span(request: "Request") -> int:
    """Tokens that have to be computed in one step."""
    return max((last - first for first, last in whole_spans(request)), default=0)


class Reach(NamedTuple):
    """A sequence of a step some of whose tokens see each other both ways."""

    sequence: int  # which one of the step
    tokens: slice  # of the step
    length: int  # of the sequence, with these tokens
    reach_S: np.ndarray  # of each of its tokens, the first position that it does not see

    def narrowed(self) -> "Reach":
        """Restrict to the range of tokens that attend to later tokens."""
        before = self.length - len(self.reach_S)
        ahead_S = self.reach_S > np.arange(before + 1, self.length + 1)
        first, end = int(ahead_S.argmax()), int(self.reach_S[ahead_S].max()) - before
        tokens = slice(self.tokens.start + first, self.tokens.start + end)
        return Reach(self.sequence, tokens, before + end, self.reach_S[first:end])


def reaches_of(chunks: Sequence["Chunk"]) -> list[Reach]:
    """Empty: all tokens of the step see what stands before them and no more."""
    reaches, at = [], 0
    for number, chunk in enumerate(chunks):
        request, start, end = chunk.request, chunk.start, chunk.start + chunk.count
        if request.pieces and start < len(request.prompt):
            before_S = np.arange(start + 1, end + 1)
            reach_S = before_S.copy()
            for first, last in whole_spans(request):
                reach_S[max(first - start, 0) : max(last - start, 0)] = last
            if (reach_S > before_S).any():
                reaches.append(Reach(number, slice(at, at + chunk.count), end, reach_S))
        at += chunk.count
    return reaches


class Axes(NamedTuple):
    """Offsets between the M-RoPE positions of a request's tokens and their indices."""

    prompt_3P: np.ndarray
    behind: int  # of the answer, whose tokens are text again


def axes_offsets(chunks: Sequence["Chunk"], tokens: int) -> np.ndarray:
    """[3, T] of a step with room for so many tokens: what is added to a position on each axis; 0 for text alone."""
    offsets_3T = np.zeros((3, tokens), dtype=np.int32)
    at = 0
    for chunk in chunks:
        request = chunk.request
        if request.pieces:
            if request.axes is None:
                request.axes = axes_of(request.pieces, len(request.prompt))
            known_3S = request.axes.prompt_3P[:, chunk.start : chunk.start + chunk.count]
            offsets_3T[:, at : at + chunk.count] = request.axes.behind
            offsets_3T[:, at : at + known_3S.shape[1]] = known_3S
        at += chunk.count
    return offsets_3T


def axes_of(pieces: Sequence["Piece"], prompt: int) -> Axes:
    numbers_3P = prompt_axes(pieces, prompt)
    return Axes(numbers_3P - np.arange(prompt), int(numbers_3P.max()) + 1 - prompt)


def prompt_axes(pieces: Sequence["Piece"], prompt: int) -> np.ndarray:
    """Frame, row and column of each token of a prompt, [3, P]."""
    parts, at, place = [], 0, 0
    for piece in pieces:
        text = piece.start - at
        parts.append(np.repeat(np.arange(place, place + text)[None], 3, axis=0))
        place += text
        parts.append(place + _grid(piece))
        place = int(parts[-1].max()) + 1
        at = piece.end
    parts.append(np.repeat(np.arange(place, place + prompt - at)[None], 3, axis=0))
    return np.concatenate(parts, axis=1)


def _grid(piece: "Piece") -> np.ndarray:
    """Grid positions of an image, or of the frames of a video."""
    step = piece.step or piece.length
    shape = (piece.length // step, step // piece.columns, piece.columns)
    grid_3R = np.indices(shape).reshape(3, -1)
    grid_3R[0] = (grid_3R[0] * piece.interval).astype(np.int64)
    return grid_3R
