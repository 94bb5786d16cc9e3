"""Routers that follow what this server has cached, and the keys that its answers are bound to.

    request ends --bind--> keys of its text, at the pages that hold it --Events--> every follower
    pages dropped by the engine --------------------------------------^

Binding happens after an answer, off its path, and only while there is a follower. Belongs to the event loop's thread.
"""

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence

import msgspec

from cairn.serve.engine.messages import Stats
from cairn.serve.engine.page_events import PageEvents
from cairn.serve.engine.prefix_cache import page_hashes
from cairn.serve.engine.weight_sources import identity_of
from cairn.serve.http.server.kv_events import KvPublisher
from cairn.serve.job import Job
from cairn.serve.pulse import Events, Frame, Hello, KeyBook, Load, Outbox, speeds
from cairn.serve.serving import Serving
from cairn.serve.text_keys import (
    PromptKeys,
    RequestFields,
    prompt_keys,
    read_fields,
    token_counts,
    with_answer,
)

WATCH_S = 4.0
QUIET = 8  # looks after which the load is reported, changed or not


class Follower:
    """A following router and the events not yet sent to it."""

    def __init__(self, owner: "Followers") -> None:
        self._owner, self.outbox = owner, Outbox()
        self._load: Load | None = None
        self._looks = 0

    def greet(self) -> list[Frame]:
        return [self._owner.hello(), Events(0, stored=self._owner.book.stored), self._owner.load()]

    def due(self) -> list[Frame]:
        """Frames with new events."""
        self._owner.collect()
        events, load = self.outbox.take(), self._owner.load()
        frames: list[Frame] = [] if events is None else [events]
        self._looks += 1
        if load != self._load or self._looks >= QUIET:
            self._load, self._looks = load, 0
            frames.append(load)
        return frames


class Followers:
    def __init__(self, serving: Serving, status: Callable[[], str], role: str) -> None:
        self.serving, self._status, self.role = serving, status, role
        self.epoch = secrets.randbits(48)  # of this process
        self.book = KeyBook(serving.limits.page_size)
        self._pages: PageEvents | None = None
        self._noting = asyncio.Lock()  # an engine reports its pages to the last one that asked
        self._followers: list[Follower] = []
        self._watched_s = 0.0
        self.publisher: KvPublisher | None = None  # for routers of other kinds

    @property
    def followed(self) -> bool:
        return bool(self._followers) or self.publisher is not None

    async def note_pages(self) -> None:
        """Start tracking cache events unless it already has."""
        async with self._noting:
            if self._pages is None:
                self.book = KeyBook(self.serving.limits.page_size)
                self._pages = await asyncio.to_thread(self.serving.engine.follow_pages)

    async def join(self) -> Follower:
        await self.note_pages()
        self.collect()
        follower = Follower(self)
        self._followers.append(follower)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def hello(self) -> Hello:
        limits = self.serving.limits
        return Hello(
            self.epoch,
            list(self.serving.models),
            limits.page_size,
            self._pages is not None,
            limits.rows,
            self.role,
            limits.budget(decoding=True),
        )

    def load(self) -> Load:
        now = time.monotonic()
        if (
            now > self._watched_s + WATCH_S / 2
        ):  # an engine elsewhere tells more often while it is watched
            self._watched_s = now
            self.serving.engine.watch(WATCH_S)
        stats: Stats = self.serving.engine.stats()
        speed = speeds(self.serving.engine.recent())
        free = 1 - stats.pages_used / max(stats.pages, 1)
        return Load(self._status(), stats.running, stats.waiting, round(free, 2), *speed)

    def collect(self) -> None:
        """Collect cache events. Called at least once a second, also without followers."""
        if self._pages is None:
            return
        pages = self._pages.take()
        if self.publisher is not None:
            self.publisher.note(pages)
        removed, cleared = self.book.note(pages)
        if removed or cleared:
            for follower in self._followers:
                follower.outbox.remove(removed, cleared)

    def begun(self, body: bytes, jobs: Sequence[Job]) -> None:
        """The keys of a stream whose prompt is computed: its answer may take long, and others have the same prompt."""
        if self._pages is None or not self._followers:
            return
        if (fields := _fields(body, jobs)) is not None:
            self.collect()
            self._bind(prompt_keys(fields), jobs[0], jobs[0].request.prompt)

    def bind(self, body: bytes, jobs: Sequence[Job]) -> None:
        """The keys of a request that has ended, and of the conversation with its answer."""
        if self._pages is None:
            return
        if self.publisher is not None:
            self.collect()
            for job in jobs:
                ids = [*job.request.prompt, *job.answer.whole.token_ids]
                self.publisher.stored(job.request, ids, self._identity())
        if not self._followers or (fields := _fields(body, jobs)) is None:
            return
        self.collect()
        job, ids = jobs[0], [*jobs[0].request.prompt, *jobs[0].answer.whole.token_ids]
        self._bind(prompt_keys(fields), job, ids)
        if fields.messages is not None and job.answer.finished:
            self._bind(with_answer(fields, job.answer.result().text), job, ids)

    def _bind(self, keys: PromptKeys, job: Job, ids: Sequence[int]) -> None:
        if all(map(self.book.has, keys.keys)):  # or there are none
            return
        counts = token_counts(keys, ids, self._spell)
        digests = page_hashes(job.request, ids, self.book.page_size, self._identity())
        fresh = self.book.bind(keys.keys, counts, digests)
        for follower in self._followers if fresh else ():
            follower.outbox.store(fresh)

    def _identity(self) -> bytes:
        """Identity of the current weights, because cached blocks of other weights are never reused."""
        return identity_of(self.serving.engine.weights_version())

    def _spell(self, id: int) -> bytes:
        tokenizer = self.serving.opened.tokenizer
        piece = None if tokenizer is None else tokenizer.piece(id)
        return piece.encode() if isinstance(piece, str) else piece or b""


def _fields(body: bytes, jobs: Sequence[Job]) -> RequestFields | None:
    """Fields of a request with a single prompt; None if it has no keys."""
    if len(jobs) != 1 or not jobs[0].request.known:
        return None
    try:
        return read_fields(body)
    except msgspec.MsgspecError:  # of a protocol that has none
        return None
