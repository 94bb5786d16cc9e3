"""A connection to one peer, as the executor sees it: streams go out, streams come in.

    Outgoing --push--> | link | --pull--> Incoming        neither waits: each moves what it can

A stream is one chunk of a schedule; a link cuts it into pieces as it likes. Streams of one direction
move one after another, so the first bytes of each can carry its header and the rest need none.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from cairn.labs.torch_backend.errors import RankMismatch
from cairn.labs.torch_backend.wire import (
    CALL_BYTES,
    Call,
    difference,
    length_bytes,
    length_of,
)

Combine = Callable[[torch.Tensor, torch.Tensor], object]  # into the first, from the second


def bytes_of(view: torch.Tensor) -> memoryview:
    """The memory of a contiguous vector."""
    return memoryview(view.view(torch.uint8).numpy())  # pyrefly: ignore


class Stream:
    """A tensor on its way: the first `at` elements of `view` have been sent or received."""

    __slots__ = ("_memory", "at", "view")

    def __init__(self, view: torch.Tensor) -> None:
        self.view = view
        self.at = 0
        self._memory: memoryview | None = None

    @property
    def done(self) -> bool:
        return self.at >= self.view.numel()

    def memory(self) -> memoryview:
        """The bytes of the view, made once."""
        if self._memory is None:
            self._memory = bytes_of(self.view)
        return self._memory


class Outgoing(Stream):
    """A tensor that is being sent."""

    __slots__ = ("header",)

    def __init__(self, view: torch.Tensor, call_header: bytes) -> None:
        super().__init__(view)
        self.header = call_header + length_bytes(view.nbytes)


class Incoming(Stream):
    """A tensor that is being received: copied over the view, or reduced into it.

    `behind` is sent from the same place (two ranks exchange): only what has left is combined with.
    """

    __slots__ = ("behind", "call", "call_header", "combine", "own_name", "peer_name")

    def __init__(
        self,
        view: torch.Tensor,
        call: Call,
        call_header: bytes,
        combine: Combine | None,
        peer_name: int,
        own_name: int,
        behind: Outgoing | None = None,
    ) -> None:
        super().__init__(view)
        self.behind = behind
        self.call = call
        self.call_header = call_header
        self.combine = combine
        self.peer_name, self.own_name = peer_name, own_name

    def may_take(self, count: int) -> bool:
        """Whether the next `count` elements of the slot have been sent."""
        return self.behind is None or self.at + count <= self.behind.at

    def check(self, header: bytes) -> None:
        """Raise unless the peer's header states the same operation, type and length."""
        if header[:CALL_BYTES] == self.call_header and length_of(header) == self.view.nbytes:
            return
        said = difference(self.call, self.view.nbytes, header)
        raise RankMismatch(
            f"{self.call.name}: rank {self.peer_name} {said} by rank {self.own_name}",
            hint="every rank calls the same operations in the same order, with the same sizes and types",
        )

    def take(self, piece: torch.Tensor) -> None:
        """The next elements, which may lie in memory that is about to be reused."""
        count = piece.numel()
        whole = count == self.view.numel()
        into = self.view if whole else self.view[self.at : self.at + count]
        if self.combine is None:
            into.copy_(piece)
        else:
            self.combine(into, piece)
        self.at += count


class Link(Protocol):
    def push(self, stream: Outgoing) -> bool:
        """Sends what there is room for; whether anything moved."""
        ...

    def pull(self, stream: Incoming) -> bool:
        """Takes what has come; whether anything moved."""
        ...

    def ready(self) -> bool:
        """Whether there is something to pull. It is polled, so it must be cheap."""
        ...

    def sleep(self, seconds: float) -> bool:
        """Until there is something to pull, and not longer than that; whether there is."""
        ...

    def sleep_for_room(self, seconds: float) -> None: ...

    def lost(self) -> str | None:
        """Why the peer will never send anything more; None while it may."""
        ...

    def close(self) -> None: ...
