"""What pieces change about attention and rotary positions: pure functions of a request, and arrays for a step.

    whole spans   tokens that see each other both ways are computed in one step: a chunk does not end inside
    reach         of each token the first position that it does not see
    axes          frame, row and column of each token, by which a decoder with sections rotates

Text has one number on all axes; a picture of h x w rows begins at the next number p and lies at (p, p + row,
p + column), and the text behind it goes on at p + max(h, w).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

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
    """Where a chunk that would end at `end` ends: not inside a span; one that begins in a span goes to its end."""
    for first, last in whole_spans(request):
        if first < end < last:
            return first if first > start else last
    return end


def longest_span(request: "Request") -> int:
    """Tokens that have to be computed in one step."""
    return max((last - first for first, last in whole_spans(request)), default=0)


def reach_of(chunks: Sequence["Chunk"], positions_T: np.ndarray) -> np.ndarray | None:
    """Of each token of a step; None: all of them see what stands before them and no more."""
    if not any(piece.sees != "before" for chunk in chunks for piece in chunk.request.pieces):
        return None
    reach_T, at = positions_T + 1, 0
    for chunk in chunks:
        own_S = positions_T[at : at + chunk.count]
        for first, last in whole_spans(chunk.request):
            reach_T[at : at + chunk.count][(first <= own_S) & (own_S < last)] = last
        at += chunk.count
    return reach_T


def axes_of(chunks: Sequence["Chunk"], positions_T: np.ndarray) -> np.ndarray | None:
    """[3, T] of a step; None: no request has pictures, and all axes are the position."""
    if not any(chunk.request.pieces for chunk in chunks):
        return None
    axes_3T = np.repeat(positions_T[None], 3, axis=0)
    at = 0
    for chunk in chunks:
        if chunk.request.pieces:
            own_S = positions_T[at : at + chunk.count]
            axes_3T[:, at : at + chunk.count] = _axes_at(chunk.request, own_S)
        at += chunk.count
    return axes_3T


def _axes_at(request: "Request", positions_S: np.ndarray) -> np.ndarray:
    if request.axes is None:
        request.axes = prompt_axes(request.pieces, len(request.prompt))
    table_3P = request.axes
    prompt = len(request.prompt)
    shift = int(table_3P.max()) + 1 - prompt  # of the answer, whose tokens are text again
    known_3S = table_3P[:, np.minimum(positions_S, prompt - 1)]
    return np.where(positions_S < prompt, known_3S, positions_S + shift)


def prompt_axes(pieces: Sequence["Piece"], prompt: int) -> np.ndarray:
    """Frame, row and column of each token of a prompt, [3, P]."""
    parts, at, place = [], 0, 0
    for piece in pieces:
        text = piece.start - at
        parts.append(np.repeat(np.arange(place, place + text)[None], 3, axis=0))
        place += text
        parts.append(place + _grid(piece))
        place += max(piece.length // piece.columns, piece.columns)
        at = piece.end
    parts.append(np.repeat(np.arange(place, place + prompt - at)[None], 3, axis=0))
    return np.concatenate(parts, axis=1)


def _grid(piece: "Piece") -> np.ndarray:
    """Of one picture, whose rows share a frame."""
    return np.indices((1, piece.length // piece.columns, piece.columns)).reshape(3, -1)
