"""Order of waiting prompts that minimises the number of first tokens later than `ttft_s`.

    can still be in time, by latest start --fits behind those before it--> first
                                          '--else the longest so far is put off--.
    late already ----------------------------------------------------------------'--> after them, `in_order`

A prompt that will be late in any case delays those that could still be in time, and a long one may delay several. The
rule is that of Moore and Hodgson, which leaves the fewest jobs of one machine late: jobs are taken by their deadlines,
and whenever one would be late, the longest of those taken so far is put off. Several servers count here as one that is
as many times as fast. A prompt takes as long on many servers as on one, though, so the order is that of latest starts
instead of deadlines; with prompts of several lengths it is a heuristic. Only fleets that are scaled have a deadline
(`ttft_s`). Elsewhere `late_binding.in_order` decides alone, since those that are late wait the longer for it. Pure: the
clock is handed in.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from cairn.fleet.late_binding import OLDEST, W, in_order
from cairn.fleet.worker import Worker


class _InTime(NamedTuple):
    """A prompt that is in time if it starts soon enough."""

    latest_start_s: float  # from now on
    place: int  # among those that wait
    takes_s: float


def by_deadline(
    waiting: Iterable[W], workers: Sequence[Worker], ttft_s: float, now_s: float
) -> list[W]:
    """Order requests: first a set that can all be in time, then the others by wait relative to length."""
    oldest = list(islice(waiting, OLDEST))
    if ttft_s == inf or not workers:
        return in_order(oldest, now_s)
    token_s = sum(map(_token_s, workers)) / len(workers)
    prompts: list[_InTime] = []
    for place, one in enumerate(oldest):
        takes_s = one.new_tokens * token_s
        latest_start_s = one.arrived_s + ttft_s - takes_s - now_s
        if latest_start_s >= 0:
            prompts.append(_InTime(latest_start_s, place, takes_s))
    prompts.sort()
    queued_s = sum(one.queued_tokens for one in workers) * token_s
    taken = _together(prompts, queued_s, len(workers))
    first = [oldest[one.place] for one in prompts if one.place in taken]
    return first + in_order((one for at, one in enumerate(oldest) if at not in taken), now_s)


def _together(prompts: Sequence[_InTime], queued_s: float, servers: int) -> set[int]:
    """Places of those that are all in time, one after the other behind what is queued at the servers."""
    longest: list[tuple[float, int]] = []  # of those that are taken, as a heap
    for latest_start_s, place, takes_s in prompts:
        heappush(longest, (-takes_s, place))
        if queued_s > latest_start_s * servers:
            queued_s += heappop(longest)[0]
        queued_s += takes_s
    return {place for _, place in longest}


def _token_s(one: Worker) -> float:
    """Time per prompt token next to decoding requests, including the decode part of each step."""
    return one.token_s + (one.step_s / one.step_tokens if one.step_tokens else 0.0)
