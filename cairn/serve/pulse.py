"""Messages of GET /cairn/pulse, with which a server reports its state to routers.

    Hello       who it is: the epoch is drawn at the start of a process, so that a restart is never taken for a gap
    Events      keys whose pages can be found from now on, and keys whose pages are gone; numbered without gaps. The
                first one, number 0, is everything that there is
    Load        how busy it is; at least twice a second, so that silence means something

Each frame is four bytes of length, big endian, and MessagePack. `KeyBook` knows which text key ends at which page and
turns events of pages into events of keys. Pure: no socket, no clock.
"""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from cairn.serve.engine.page_events import PageEvent
from cairn.serve.engine.step_times import StepTimes

LENGTH = struct.Struct(">I")
LARGEST_FRAME = 64 << 20
FITTED = 128  # steps that speeds are taken from


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    epoch: int
    models: list[str]
    page_size: int
    exact: bool  # are events sent? Without them a router knows only what it has sent here itself
    rows: int
    role: str = "both"
    step_tokens: int = 0  # of prompts, at most, in a step that also decodes


class Events(msgspec.Struct, frozen=True, array_like=True, tag="events"):
    number: int
    stored: list[tuple[int, int]] = []  # key, and the tokens that are cached up to it
    removed: list[int] = []
    cleared: bool = False  # before anything else


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    status: str = "ok"  # as GET /health says it
    running: int = 0
    waiting: int = 0
    free_share: float = 1.0  # of the pages of the cache
    step_s: float = 0.0  # of a step that only decodes
    token_s: float = 0.0  # what a prompt token adds to a step
    row_s: float = 0.0  # what a request adds to a step that decodes


Frame = Hello | Events | Load
encode = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(Frame).decode


def framed(frame: Frame) -> bytes:
    body = encode(frame)
    return LENGTH.pack(len(body)) + body


class Speeds(NamedTuple):
    """Speeds of an engine in seconds; 0 if unknown."""

    step: float = 0.0  # of a step that only decodes
    token: float = 0.0  # what a prompt token adds to a step
    row: float = 0.0  # what a request adds to a step that decodes


def speeds(times: Sequence[StepTimes]) -> Speeds:
    """Medians over recent steps; the cost of another request is the slope of a line through step sizes."""
    recent = [step for step in times[-FITTED:] if step.tokens]
    decoding = [step for step in recent if not step.prefill and step.sampled]
    decode = _median([step.total for step in decoding])
    prompts = [
        max(step.total - decode, 0.0) / step.prefill for step in recent if step.prefill >= 16
    ]
    return Speeds(
        decode, _median(prompts), _slope([(s.sampled, s.total) for s in decoding], decode)
    )


def _slope(points: Sequence[tuple[int, float]], level: float) -> float:
    """Non-negative slope of a line through the points; a quarter of the level if all sizes are equal."""
    if not points:
        return 0.0
    middle = sum(size for size, _ in points) / len(points)
    spread = sum((size - middle) ** 2 for size, _ in points)
    if not spread:
        return level / (4 * max(middle, 1))
    mean = sum(seconds for _, seconds in points) / len(points)
    return max(sum((size - middle) * (took - mean) for size, took in points) / spread, 0.0)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


class KeyBook:
    """Index of cached keys by the block at which each ends."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._live: set[bytes] = set()  # digests of pages that can be found
        self._keys_at: dict[bytes, dict[int, int]] = {}  # digest -> key -> cached tokens
        self._page_of: dict[int, bytes] = {}

    @property
    def stored(self) -> list[tuple[int, int]]:
        """Everything that there is."""
        return [pair for keys in self._keys_at.values() for pair in keys.items()]

    def note(self, events: Iterable[PageEvent]) -> tuple[list[int], bool]:
        """(keys that are gone, or all are)."""
        removed: list[int] = []
        cleared = False
        for stored, digest in events:
            if stored:
                self._live.add(digest)
            elif digest:
                self._live.discard(digest)
                gone = self._keys_at.pop(digest, {})
                for key in gone:
                    del self._page_of[key]
                removed += gone
            else:
                self._live.clear()
                self._keys_at.clear()
                self._page_of.clear()
                removed, cleared = [], True
        return removed, cleared

    def has(self, key: int) -> bool:
        """Can it be found?"""
        return key in self._page_of

    def bind(
        self, keys: Sequence[int], counts: Sequence[int], digests: Sequence[bytes]
    ) -> list[tuple[int, int]]:
        """`counts[i]` tokens lie before key i, and the page before them has a digest; returns what is new."""
        fresh: list[tuple[int, int]] = []
        for key, count in zip(keys, counts, strict=True):
            pages = min(count // self.page_size, len(digests))
            if not pages:
                continue
            digest = digests[pages - 1]
            if digest not in self._live:
                break
            before = self._page_of.get(key)
            if before == digest:
                continue
            if before is not None:
                del self._keys_at[before][key]
            self._page_of[key] = digest
            self._keys_at.setdefault(digest, {})[key] = pages * self.page_size
            fresh.append((key, pages * self.page_size))
        return fresh


class Outbox:
    """Events that were not reported to one follower yet."""

    def __init__(self) -> None:
        self._number = 1  # 0 is what there was when it came
        self._stored: dict[int, int] = {}
        self._removed: list[int] = []
        self._cleared = False

    def remove(self, keys: Sequence[int], cleared: bool = False) -> None:
        """Record removed keys, ordered before keys stored later, which may return."""
        if cleared:
            self._stored, self._removed, self._cleared = {}, [], True
        for key in keys:
            self._stored.pop(key, None)
        self._removed += keys

    def store(self, pairs: Iterable[tuple[int, int]]) -> None:
        self._stored.update(pairs)

    def take(self) -> Events | None:
        """Return the pending events with the next sequence number."""
        if not (self._stored or self._removed or self._cleared):
            return None
        events = Events(self._number, list(self._stored.items()), self._removed, self._cleared)
        self._number += 1
        self._stored, self._removed, self._cleared = {}, [], False
        return events
