"""Events of the prefix cache, for routers that track what each server has
cached.

    PrefixCache --stored, dropped, cleared--> PageEvents --take--> followers

The engine's thread writes, another one takes; neither waits. A page is known by the digest of its whole prefix. Only
the first cache group is reported: a prefix that another group has lost is found shorter than it seems here.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple


class PageEvent(NamedTuple):
    stored: bool
    digest: bytes  # empty: everything was dropped


class PageEvents:
    def __init__(self, stored: Iterable[bytes]) -> None:
        """`known`: what can be found when the record begins."""
        self._log: deque[PageEvent] = deque(PageEvent(True, digest) for digest in stored)

    def stored(self, digest: bytes) -> None:
        self._log.append(PageEvent(True, digest))

    def dropped(self, digest: bytes) -> None:
        self._log.append(PageEvent(False, digest))

    def cleared(self) -> None:
        self._log.append(PageEvent(False, b""))

    def extend(self, events: Iterable[tuple[bool, bytes]]) -> None:
        """Add events of an engine in another process."""
        self._log.extend(PageEvent(*event) for event in events)

    def take(self) -> list[PageEvent]:
        """Return the events since the last call, in order."""
        log = self._log
        return [log.popleft() for _ in range(len(log))]
