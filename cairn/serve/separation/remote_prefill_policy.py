"""Is a prompt computed elsewhere rather than here? Only where that saves the requests here more than it costs.

    computed here    the others that decode here wait for it: seconds of the prompt x requests that decode, of which
                     half counts, as they are in the middle of their answers; and it waits for the prompts before it
    elsewhere        the answer begins later: the way there and back, prompts from here that wait there, and its pages'
                     way; and others will wait behind it. A queue of L prompts, on average, is busy for L / (1 + L) of
                     its time: L come while those before it are computed, and (1 + L) times as many until it is empty

So an idle decode server computes prompts itself, as a server without a role does. What a token, a byte and the way cost
is taken from prompts that came from elsewhere; nothing is known before the first, or when the last is long ago: then
the next one is asked for elsewhere, to learn. Pure: the clock is handed in.
"""

from collections.abc import Callable

import msgspec

from cairn.serve.engine.request import Request
from cairn.serve.engine.scheduler import Scheduler

NEWEST = 0.3  # what the last prompt counts for
LONG_AGO_S = 30.0


class Pending(msgspec.Struct, frozen=True):
    """Prompts that one prefill server was asked for, and has not answered."""

    prompts: float = 0.0
    tokens: float = 0.0


NOTHING_PENDING = Pending()


class RemoteCosts(msgspec.Struct):
    """Costs of remote prefill, measured on recent prompts."""

    token_s: float = 0.0  # to compute one
    way_s: float = 0.0  # there and back, and waiting for prompts that are not from here
    bytes_per_s: float = 0.0
    known_at: float = -LONG_AGO_S  # a moment

    def note_reply(
        self, tokens: int, compute_s: float, took_s: float, now: float, behind: int = 0
    ) -> None:
        """A prompt of so many tokens that had to be computed has come back; `behind`: tokens from here before it."""
        if tokens > 0:
            self.token_s = _newer(self.token_s, compute_s / tokens)
        self.way_s = _newer(self.way_s, max(took_s - compute_s - behind * self.token_s, 0.0))
        self.known_at = now

    def note_pages(self, bytes: int, seconds: float) -> None:
        if bytes > 0 and seconds > 0:
            self.bytes_per_s = _newer(self.bytes_per_s, bytes / seconds)


def remote_pays(
    costs: RemoteCosts,
    tokens: int,
    bytes: int,
    decoding: int,
    ahead: int,
    now: float,
    pending: Pending = NOTHING_PENDING,
) -> bool:
    """`tokens`: of the prompt that are not in the cache here, `bytes`: of their pages.

    `decoding`: requests here; `ahead`: tokens of prompts here that are computed before it.
    """
    if now - costs.known_at >= LONG_AGO_S or not costs.bytes_per_s:
        return True
    spared_s = (tokens * decoding / 2 + ahead) * costs.token_s
    behind = pending.prompts * (1 + pending.prompts)  # prompts
    waits_s = (pending.tokens + tokens * behind) * costs.token_s
    return spared_s > costs.way_s + bytes / costs.bytes_per_s + waits_s


def pays_elsewhere(
    scheduler: Scheduler,
    request: Request,
    costs: RemoteCosts,
    bytes_of: Callable[[int, int], int],
    now: float,
    pending: Pending,
) -> bool:
    """Return whether remote prefill is faster. `bytes_of(tokens, start)`: bytes of the blocks from `start` on."""
    start = scheduler.blocks.prefix.find(request).pages * scheduler.limits.page_size
    tokens = len(request.prompt)
    ahead = sum(max(one.known - one.computed, 0) for one in scheduler.requests.values())
    moved = bytes_of(tokens, start)
    return remote_pays(costs, tokens - start, moved, scheduler.running, ahead, now, pending)


def _newer(mean: float, newest: float) -> float:
    return mean + NEWEST * (newest - mean) if mean else newest
