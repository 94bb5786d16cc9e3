"""Until when may another process read our pages? Leases, on a clock that is passed in.

    owner   grant -> [claimed by holders, renewed by their beats] -> released | expired | lost -> pages free, once
    holder  beat(n) sent at t -> answered -> may read until t + lease

The owner counts a lease from when a beat arrives, the holder from when it was sent: whatever the network does, the
holder stops first. No clock is compared with another machine's, only durations. A killed holder's pages come free at
once (its connection breaks), a silent one's when its lease runs out. Pure: no network, no clock of its own.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cairn.comm.transfer.errors import TransferError


class Terms(NamedTuple):
    """Terms of a lease in seconds. A holder sends several heartbeats per lease, so one may be lost."""

    lease_s: float = 5.0
    beat_s: float = 0.5
    unclaimed_s: float = 30.0  # until the first beat, while a request is still being routed
    read_s: float = 30.0  # without a read's end its source is as good as dead


TERMS = Terms()


class Freed(NamedTuple):
    request: str
    pages: tuple[int, ...]
    why: str


class Lease:
    def __init__(self, pages: tuple[int, ...], unclaimed_until: float) -> None:
        self.pages = pages
        self.unclaimed_until = unclaimed_until
        self.until: dict[str, float] = {}  # holder -> end of its claim
        self.gone: dict[str, str] = {}  # holder -> why it holds no more
        self.expected = 0  # holders that there will be; 0: none has come yet
        self.withdrawn = False


class Owner:
    """The side whose pages are read."""

    def __init__(self, terms: Terms = TERMS) -> None:
        self.terms = terms
        self._leases: dict[str, Lease] = {}

    def grant(self, request: str, pages: Iterable[int], now: float) -> None:
        if request in self._leases:
            raise TransferError(
                f"{request!r} has a lease already", hint="requests need other names"
            )
        self._leases[request] = Lease(tuple(pages), now + self.terms.unclaimed_s)

    def renew(self, request: str, holder: str, holders: int, now: float) -> bool:
        """A beat has arrived; False: there is nothing to hold any more."""
        lease = self._leases.get(request)
        if lease is None or lease.withdrawn or holder in lease.gone:
            return False
        lease.expected = max(lease.expected, holders)
        lease.until[holder] = now + self.terms.lease_s
        return True

    def release(self, request: str, holder: str, holders: int, now: float) -> list[Freed]:
        """A holder has all it wanted; said twice or too late, it changes nothing."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.expected = max(lease.expected, holders)
        lease.until.pop(holder, None)
        lease.gone.setdefault(holder, "released")
        return self.expire(now)

    def lost(self, holder: str, now: float) -> list[Freed]:
        """A holder is dead for certain: it will neither read nor come back under this name."""
        for lease in self._leases.values():
            if lease.until.pop(holder, None) is not None:
                lease.gone[holder] = "lost"
        return self.expire(now)

    def withdraw(self, request: str, now: float) -> list[Freed]:
        """The owner wants its pages back: no more renewals. Who reads may finish within its claim."""
        lease = self._leases.get(request)
        if lease is None:
            return []
        lease.withdrawn = True
        return self.expire(now)

    def expire(self, now: float) -> list[Freed]:
        """Everything that may not be read any more."""
        freed = []
        for request, lease in list(self._leases.items()):
            why = self._over(lease, now)
            if why is not None:
                del self._leases[request]
                freed.append(Freed(request, lease.pages, why))
        return freed

    def held(self) -> set[str]:
        return set(self._leases)

    def _over(self, lease: Lease, now: float) -> str | None:
        """Why the pages are free, or None."""
        for holder in [holder for holder, end in lease.until.items() if end <= now]:
            del lease.until[holder]
            lease.gone[holder] = "expired"
        if lease.until:
            return None
        reasons = set(lease.gone.values())
        worst = next((one for one in ("lost", "expired") if one in reasons), "released")
        if lease.expected and len(lease.gone) >= lease.expected:
            return worst
        if lease.withdrawn:
            return "withdrawn"
        if lease.unclaimed_until > now:
            return None  # another holder may still come
        return worst if lease.gone else "never claimed"


class LeaseHolder:
    """The side that reads: which requests of one owner it may read, as far as it can know."""

    def __init__(self, terms: Terms = TERMS) -> None:
        self.terms = terms
        self._number = 0
        self._sent: dict[int, float] = {}  # beats without an answer yet
        self._until: dict[str, float] = {}

    def beat(self, now: float) -> int:
        """The number of a beat that is sent now."""
        self._number += 1
        self._sent[self._number] = now
        # Answers to beats older than a lease say nothing any more.
        self._sent = {n: at for n, at in self._sent.items() if now - at < self.terms.lease_s}
        return self._number

    def answered(self, number: int, granted: Iterable[str]) -> None:
        sent = self._sent.get(number)
        if sent is not None:
            for request in granted:
                end = sent + self.terms.lease_s
                self._until[request] = max(end, self._until.get(request, end))

    def may_read(self, request: str, now: float) -> bool:
        return self._until.get(request, now) > now

    def drop(self, request: str) -> None:
        self._until.pop(request, None)
