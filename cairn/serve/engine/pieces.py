"""Spans of a prompt whose embeddings are not looked up but given: images, audio. Pure Python: rows are numbers here.

    prompt   t t t [i i i i] t t        placeholders i stand for a piece; in the token words they are -2 - row
    arena    rows of embeddings         written by an encoder, read by the chunk that computes the piece

A request holds its rows until it ends, so one that was preempted is computed again from them. Rows that none holds
stay findable by their digest until another piece needs the room; equal pieces share rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cairn.core.errors import RequestError
from cairn.models.vision.spec import Sees

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request

FIRST_ROW = -2  # token word of arena row 0; -1 is the token sampled last


class Piece(msgspec.Struct, frozen=True):
    start: int  # in the prompt
    length: int  # tokens, and rows of the arena
    digest: bytes  # of what it shows: equal digests have equal embeddings
    picture: int = 0  # which of its request's pictures it shows
    offset: int = 0  # and from which row of that on
    sees: Sees = "before"  # what its tokens see besides what stands before them
    columns: int = 1  # rows of the arena that lie side by side in the picture
    step: int = 0  # rows of one step of a video; 0: all of them
    interval: float = 1.0  # numbers from one step to the next

    @property
    def end(self) -> int:
        return self.start + self.length


class Span(msgspec.Struct):
    """Rows of one digest."""

    first: int
    length: int
    holders: int


class ArenaRows:
    """Allocation of arena rows to pieces. Rows without a request are reused, the oldest first."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._spans: dict[bytes, Span] = {}  # in the order in which they were last given back

    def hold(self, digest: bytes, length: int) -> tuple[int, bool] | None:
        """The first row, and whether its embeddings have to be written; None: there is no room now."""
        span = self._spans.get(digest)
        if span is not None:
            span.holders += 1
            return span.first, False
        first = self._room(length)
        while first is None:
            idle = next((key for key, span in self._spans.items() if not span.holders), None)
            if idle is None:
                return None
            del self._spans[idle]
            first = self._room(length)
        self._spans[digest] = Span(first, length, 1)
        return first, True

    def release(self, digest: bytes, keep: bool = True) -> None:
        """`keep`: its rows have been written, and stay findable."""
        span = self._spans.pop(digest)
        span.holders -= 1
        if keep or span.holders:
            self._spans[digest] = span

    def held(self) -> int:
        """Rows of requests that have not ended."""
        return sum(span.length for span in self._spans.values() if span.holders)

    def forget(self) -> bool:
        """Drop all rows if none is held; whether there were any."""
        if not self._spans or any(span.holders for span in self._spans.values()):
            return False
        self._spans.clear()
        return True

    def _room(self, length: int) -> int | None:
        """The first gap of so many rows."""
        at = 0
        for span in sorted(self._spans.values(), key=lambda span: span.first):
            if span.first - at >= length:
                return at
            at = span.first + span.length
        return at if self.rows - at >= length else None


def check_pieces(pieces: Sequence[Piece], rows: Sequence[int], prompt: int, arena: int) -> None:
    """Refuse pieces that overlap, leave the prompt or have no rows; `rows` is empty while they wait for them."""
    end = 0
    for piece, row in zip(pieces, rows or [0] * len(pieces), strict=True):
        if piece.length < 1 or piece.start < end or piece.end > prompt:
            raise RequestError(
                f"a piece has tokens {piece.start} to {piece.end}, the one before ends at {end}, "
                f"the prompt at {prompt}",
                hint="pieces are in order, do not overlap and lie inside the prompt",
            )
        if not 0 <= row <= arena - piece.length:
            raise RequestError(
                f"a piece of {piece.length} tokens begins at row {row} of an arena of {arena}",
                hint="hold rows of the engine's arena first",
            )
        end = piece.end
    total = sum(piece.length for piece in pieces)
    if not rows and total > arena:
        raise RequestError(
            f"the pictures have {total} tokens, and there is room for {arena}",
            hint="send fewer pictures, or smaller ones",
        )


def words_of_pieces(request: "Request", start: int, tokens: list[int]) -> list[int]:
    """Tokens `start ..` of a prompt, with the rows of the arena in place of placeholders."""
    words, end = list(tokens), start + len(tokens)
    for piece, row in zip(request.pieces, request.piece_rows, strict=True):
        for at in range(max(start, piece.start), min(end, piece.end)):
            words[at - start] = FIRST_ROW - (row + at - piece.start)
    return words


def identity_within(pieces: Sequence[Piece], first: int, last: int) -> bytes:
    """Identity of the pieces within tokens `first .. last`, which distinguishes blocks with equal placeholders."""
    parts = []
    for piece in pieces:
        if piece.start < last and first < piece.end:
            offset = max(first, piece.start) - piece.start
            parts.append(piece.digest + offset.to_bytes(8, "little"))
    return b"".join(parts)
