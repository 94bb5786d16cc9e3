"""A second copy of a request that has had no answer for a while, to another server: the first one that answers is kept.

Exchange --hedge_s without a byte--> Hedge --begins first--> the exchange goes on with its connection
                                       |--- the first server is lost --> likewise
                                       '--- begins second, fails --> it is dropped
"""

import asyncio
import time
from typing import TYPE_CHECKING

from cairn.fleet.routing_policy import sent_at_once
from cairn.fleet.upstream import Upstream
from cairn.fleet.worker import Worker

if TYPE_CHECKING:
    from cairn.fleet.exchange import Exchange
    from cairn.fleet.router import Router

FAILED = 429  # answers from here on do not win
SHARE, MOST = 0.1, 8.0  # copies for each request, and at most in the budget


class Hedging:
    """When a copy is sent: the router's budget of them."""

    def __init__(self, router: "Router") -> None:
        self._router = router
        self.budget = MOST  # copies that may be sent now

    def sent(self, exchange: "Exchange", after_s: float) -> None:
        """A request was sent to a server. 0: there is no other one."""
        self.budget = min(self.budget + SHARE, MOST)
        if after_s and exchange.streams:
            loop = asyncio.get_running_loop()
            loop.call_later(after_s, self._hedge, exchange, exchange.attempts)

    def _hedge(self, exchange: "Exchange", attempt: int) -> None:
        """A copy to another server, if nothing has come from the first one."""
        now, first, router = time.monotonic(), exchange.worker, self._router
        if attempt != exchange.attempts or first is None or not exchange.unanswered:
            return
        workers = router.eligible(now, exchange.model, {*exchange.tried, first.number})
        workers = [one for one in workers if one.state == "up"]
        if not workers or self.budget < 1:
            return
        self.budget -= 1
        choice, new = router.choose(sent_at_once(exchange.ask), exchange.keys, workers, now)
        router.note_sent(exchange.ask, exchange.keys, choice, now)
        exchange.hedge = copy = Hedge(exchange, choice.chosen, new)
        router.views.hedged += 1
        if (upstream := router.pool.take(choice.chosen)) is not None:
            copy.connected(upstream, "")
        else:
            router.connect(choice.chosen, copy.connected)


class Hedge:
    """Reads the copy's answer up to its first bytes."""

    def __init__(self, exchange: "Exchange", worker: Worker, new_tokens: int) -> None:
        self.exchange, self.worker, self.new_tokens = exchange, worker, new_tokens
        self.upstream: Upstream | None = None
        self._status, self._lines, self._over = 0, b"", False
        worker.takes(new_tokens, exchange.streams)

    def connected(self, upstream: Upstream | None, reason: str) -> None:
        if upstream is None:
            self.cancel()
        elif self._over:
            upstream.drop()
        else:
            self.upstream = upstream
            upstream.send(self, self.exchange.request_bytes())

    def cancel(self) -> None:
        """The other one was faster, or this one has failed."""
        if not self._over:
            self._over, upstream = True, self.upstream
            self.worker.computed(self.new_tokens, self.exchange.streams)
            self.exchange.hedge = None
            if upstream is not None:
                upstream.drop()

    def take_over(self) -> bool:
        """The first server is lost: is this one answering instead?"""
        if self._over or self.upstream is None or self.worker.state != "up":
            self.cancel()
            return False
        self._over = True
        self.exchange.adopt(self.worker, self.upstream, self.new_tokens)
        self.exchange.head(self._status, self._lines)
        return True

    def _win(self, upstream: Upstream | None) -> bool:
        """The exchange goes on here; `upstream`: the connection, if more comes from it."""
        exchange = self.exchange
        if self._over or self._status >= FAILED:
            self.upstream = upstream
            self.cancel()
            return False
        self._over = True
        exchange.adopt(self.worker, upstream, self.new_tokens)
        exchange.head(self._status, self._lines)
        return True

    # -- as a reader -----------------------------------------------------------------------------

    def head(self, status: int, lines: bytes) -> None:
        self._status, self._lines = status, lines

    def chunk(self, body: bytes) -> None:
        if self._win(self.upstream):
            self.exchange.chunk(body)

    def end(self, body: bytes) -> None:
        if self._win(None):  # its connection is used by others already
            self.exchange.end(body)

    def lost(self, reason: str) -> None:
        self.upstream = None
        self.worker.lost += 1
        self.cancel()
