"""Requests with pictures: they wait until the rows of their pictures are in the arena, then go to the scheduler.

    add --> waiting for rows --admit: hold rows, run the tower for those that are new--> scheduler

Pictures of all requests that are admitted together go through the tower in one call, up to `most_patches` in a step, so
that answers under way are not held up for longer. First come, first served: a request that finds no rows lets no other
pass. Pure Python: how rows are computed and written is handed in.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from cairn.core.errors import RequestError
from cairn.models.vision.picture import Picture
from cairn.models.vision.spec import VisionSpec
from cairn.serve.engine.pieces import ArenaRows, Piece
from cairn.serve.engine.request import Request, RequestId


class NewRows:
    """Rows of a picture that have to be computed, and where they are written."""

    __slots__ = ("parts", "picture")

    def __init__(self, picture: Picture) -> None:
        self.picture = picture
        self.parts: list[tuple[int, Piece]] = []  # first row of the arena, and what goes there


def pieces_of(
    pictures: Sequence[Picture], spans: Sequence[Sequence[range]], spec: VisionSpec
) -> list[Piece]:
    """Pieces of image embeddings: one for each run of placeholders in a prompt."""
    pieces = []
    for number, (picture, runs) in enumerate(zip(pictures, spans, strict=True)):
        offset = 0
        for run in runs:
            digest = _digest(picture, offset, len(run))
            piece = Piece(run.start, len(run), digest, number, offset, spec.sees)
            pieces.append(_placed(piece, picture, spec) if spec.axes else piece)
            offset += len(run)
    return pieces


def _placed(piece: Piece, picture: Picture, spec: VisionSpec) -> Piece:
    """Add the grid of an image, with the steps of a video spaced by its frame interval."""
    apart = spec.tokens_per_second * spec.tower.frames * picture.frame_s or 1.0
    return msgspec.structs.replace(
        piece,
        columns=max(picture.width // spec.cell, 1),
        step=spec.rows(picture.height, picture.width),
        interval=apart,
    )


def _digest(picture: Picture, offset: int, length: int) -> bytes:
    place = offset.to_bytes(4, "little") + length.to_bytes(4, "little")
    return hashlib.blake2b(picture.digest + place, digest_size=16).digest()


class MediaCounts(NamedTuple):
    """Since the start."""

    computed: int = 0  # pictures that the tower computed
    found: int = 0  # pictures whose rows were there
    seconds: float = 0.0  # of the tower; on a GPU, of launching it


class WaitingForRows:
    """The queue in front of the scheduler's."""

    def __init__(
        self,
        arena: ArenaRows,
        encode: Callable[[Sequence[NewRows]], None],
        patches: Callable[[Picture], int],
        most_patches: int,
    ) -> None:
        """`encode` computes rows and writes them; `patches`: of a picture, what the tower computes."""
        self.arena, self.encode, self.patches = arena, encode, patches
        self.most_patches = most_patches
        self.waiting: deque[Request] = deque()
        self.counts = MediaCounts()

    def push(self, request: Request) -> None:
        rows = sum(piece.length for piece in request.pieces)
        if rows > self.arena.rows:
            raise RequestError(
                f"the pictures have {rows} tokens, and there is room for {self.arena.rows}",
                hint="send fewer pictures, or smaller ones",
            )
        self.waiting.append(request)

    def remove(self, id: RequestId) -> Request | None:
        """Take a request out of the queue; None: it is not in it."""
        removed = next((request for request in self.waiting if request.id == id), None)
        if removed is not None:
            self.waiting.remove(removed)
        return removed

    def admit(self) -> list[Request]:
        """Requests whose rows are all in the arena now, `MediaFailed` where the tower failed."""
        admitted: list[Request] = []
        new: list[NewRows] = []
        patches = 0
        while self.waiting and (not patches or patches < self.most_patches):
            rows_to_compute = self._hold(self.waiting[0])
            if rows_to_compute is None:
                break
            admitted.append(self.waiting.popleft())
            new += rows_to_compute
            patches += sum(self.patches(rows.picture) for rows in rows_to_compute)
        if not new:
            self._count(admitted, new, 0.0)
            return admitted
        began = time.monotonic()
        try:
            self.encode(new)
        except Exception as problem:  # whatever it was, it ends these requests and no others
            unwritten = {piece.digest for rows in new for _, piece in rows.parts}
            for request in admitted:
                for piece in request.pieces:
                    self.arena.release(piece.digest, keep=piece.digest not in unwritten)
            raise MediaFailed(admitted, problem) from problem
        self._count(admitted, new, time.monotonic() - began)
        return admitted

    def _count(self, admitted: Sequence[Request], new: Sequence[NewRows], seconds: float) -> None:
        """All that were admitted with a call of the tower have waited for it."""
        for request in admitted:
            request.ledger.media += seconds
        before, pictures = self.counts, sum(len(request.pictures) for request in admitted)
        self.counts = MediaCounts(
            before.computed + len(new), before.found + pictures - len(new), before.seconds + seconds
        )

    def _hold(self, request: Request) -> list[NewRows] | None:
        """Rows for every piece, and those that have to be computed; None: there is no room for all of them."""
        new: dict[int, NewRows] = {}
        reserved: list[tuple[Piece, bool]] = []
        rows: list[int] = []
        for piece in request.pieces:
            place = self.arena.hold(piece.digest, piece.length)
            if place is None:
                for one, fresh in reversed(reserved):
                    self.arena.release(one.digest, keep=not fresh)
                # Rows that were found may lie so that no gap is long enough: begin again without them.
                return self._hold(request) if self.arena.forget() else None
            row, fresh = place
            reserved.append((piece, fresh))
            rows.append(row)
            if fresh:
                picture = request.pictures[piece.picture]
                new.setdefault(piece.picture, NewRows(picture)).parts.append((row, piece))
        request.piece_rows = rows
        return list(new.values())


class MediaFailed(Exception):
    """The tower did not compute the pictures of these requests; they hold no rows."""

    def __init__(self, requests: list[Request], problem: Exception) -> None:
        super().__init__(str(problem))
        self.requests, self.problem = requests, problem
