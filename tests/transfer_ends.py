"""Both ends of every transport, for tests: made by name, closed at the end, skipped with a reason where absent."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from cairn.comm.transfer import nixl
from cairn.comm.transfer.endpoint import TransferEndpoint
from cairn.comm.transfer.mover import Patience
from cairn.comm.transfer.shm import shm
from cairn.comm.transfer.tcp import tcp
from cairn.comm.transfer.transport import Event, PeerGone, TransferDone, TransferFailed, Transport

PATIENT = Patience(silence_s=120)  # a loaded machine may be silent for long
KINDS = ["tcp", "shm", "nixl"]


def make_end(kind: str, name: str, patience: Patience = PATIENT) -> TransferEndpoint:
    if kind == "nixl":
        reason = nixl.why_not()
        if reason is not None:
            pytest.skip(reason)
        return nixl.nixl(name, patience=patience)
    return {"tcp": tcp, "shm": shm}[kind](name, patience=patience)


@contextmanager
def closing(*ends: Transport) -> Iterator[None]:
    try:
        yield
    finally:
        for end in ends:
            end.close()


def wait_for(end: Transport, what: Callable[[Event], bool], seconds: float = 60) -> list[Event]:
    """All events up to the first that fits."""
    seen: list[Event] = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in end.events(0.2):
            seen.append(event)
        if any(map(what, seen)):
            return seen
    raise AssertionError(f"nothing of the kind within {seconds} s; seen: {seen[-5:]}")


def settle(end: Transport, tickets: set[int]) -> None:
    """Until every ticket is done; any failure is the test's."""
    left = set(tickets)
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:
        for event in end.events(0.2):
            assert not isinstance(event, TransferFailed | PeerGone), event
            if isinstance(event, TransferDone):
                left.discard(event.ticket)
    assert not left
