"""Streams through shared memory: the sender copies into a place, the receiver reduces straight from it.

    sender     wait room   copy in    post items      --.      one ring of `places` for each direction:
    receiver                          wait items <-----'       while one is read the next is written
               post room <- combine   out

A chunk that is larger than a place goes piece by piece, and a piece is small enough to stay in the
cache between the two. A peer that has died is seen by its pidfd, also before it is reaped.
"""

import os
import select
from ctypes import memmove

import torch

from cairn.labs.torch_backend.link import Incoming, Outgoing
from cairn.labs.torch_backend.segment import Ring, Segment, State
from cairn.labs.torch_backend.wire import HEADER_BYTES

KEPT_VIEWS = 512


class Peer:
    """A process of this host: whether it lives, and what it does."""

    def __init__(self, pid: int, segment: Segment, place: int) -> None:
        self.pid, self._segment, self._place = pid, segment, place
        try:
            self._fd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._fd = None

    def lost(self) -> str | None:
        if self._fd is None or self._ended(self._fd):
            return f"has died (process {self.pid})"
        if self.state().left:
            return "has left the group"
        return None

    def state(self) -> State:
        return self._segment.state(self._place)

    @staticmethod
    def _ended(fd: int) -> bool:
        """A pidfd can be read when its process has ended. A poll of its own: several threads ask."""
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class SharedLink:
    def __init__(self, outgoing: Ring, incoming: Ring, peer: Peer) -> None:
        self._out, self._in, self._peer = outgoing, incoming, peer
        self._out_place = self._in_place = 0
        self._places = len(outgoing.places)
        self._piece = outgoing.places[0].numel()
        self._has_item = self._has_room = False  # taken from the semaphore, not yet used
        self._out_at = [place.data_ptr() for place in outgoing.places]
        self._views: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}

    def push(self, stream: Outgoing) -> bool:
        view, total, moved = stream.view, stream.view.numel(), False
        most = self._piece // view.element_size()
        while stream.at < total:
            if self._has_room:
                self._has_room = False
            elif not self._out.room.try_wait():
                return moved
            place, begin = self._out_place, stream.at
            count = min(total - begin, most)
            if begin == 0:
                self._out.headers[place][:HEADER_BYTES] = stream.header
            size = view.element_size()
            memmove(self._out_at[place], view.data_ptr() + begin * size, count * size)
            self._out.items.post()
            self._out_place = (place + 1) % self._places
            stream.at = begin + count
            moved = True
        return moved

    def pull(self, stream: Incoming) -> bool:
        total, moved = stream.view.numel(), False
        most = self._piece // stream.view.element_size()
        while stream.at < total:
            count = min(total - stream.at, most)
            if not self.ready() or not stream.may_take(count):
                return moved
            self._has_item = False
            place = self._in_place
            if stream.at == 0:
                stream.check(bytes(self._in.headers[place][:HEADER_BYTES]))
            stream.take(self._view(place, stream.view.dtype, count))
            self._in.room.post()
            self._in_place = (place + 1) % self._places
            moved = True
        return moved

    def peek(self) -> bytes | None:
        """The header of what is next, if it has come: a receiver of tags looks before it takes."""
        return bytes(self._in.headers[self._in_place][:HEADER_BYTES]) if self.ready() else None

    def ready(self) -> bool:
        if not self._has_item:
            self._has_item = self._in.items.try_wait()
        return self._has_item

    def sleep(self, seconds: float) -> bool:
        if not self._has_item:
            self._has_item = self._in.items.wait(seconds)
        return self._has_item

    def sleep_for_room(self, seconds: float) -> None:
        if not self._has_room:
            self._has_room = self._out.room.wait(seconds)

    def lost(self) -> str | None:
        return self._peer.lost()

    def close(self) -> None:
        self._views.clear()

    def _view(self, place: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A received piece as a tensor; views are cached because few shapes recur."""
        key = (place, dtype, count)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            memory = self._in.places[place]
            view = self._views[key] = memory[: count * dtype.itemsize].view(dtype)
        return view
