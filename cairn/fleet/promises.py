"""In which order do waiting prompts go, where first tokens are promised within a time? So that most of them hold it.

    waiting, by the latest start that is in time --too much?--> without the longest prompts --> first
                                                  '--> late whatever happens ------------------> after them

A prompt that will be late anyhow delays those that could still be in time, and a long one may delay several. The rule
is that of Moore and Hodgson, which leaves the fewest jobs of one machine late: whenever one of those taken would be
late, the longest of them is put off. Several servers count as one that is as many times as fast, and who has to begin
first goes first, because a long prompt takes as long on many servers. Only fleets that are scaled promise a time
(`ttft_s`); elsewhere `late_binding.in_order` decides alone, since those that are late wait the longer for it. Pure: the
clock is handed in.
"""

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice
from math import inf
from typing import NamedTuple

from cairn.fleet.late_binding import OLDEST, W, in_order
from cairn.fleet.worker import Worker


class Prompt(NamedTuple):
    """One that can still be in time by itself."""

    start_s: float  # at the latest, from now on
    at: int  # its place among those that wait
    takes_s: float


def ordered(
    waiting: Iterable[W], workers: Sequence[Worker], ttft_s: float, now_s: float
) -> list[W]:
    """Those first that can be in time together; then the others, who has waited longest for the least first."""
    oldest = list(islice(waiting, OLDEST))
    if ttft_s == inf or not workers:
        return in_order(oldest, now_s)
    token_s = sum(map(_token_s, workers)) / len(workers)
    prompts: list[Prompt] = []
    for at, one in enumerate(oldest):
        takes_s = one.new_tokens * token_s
        start_s = one.arrived_s + ttft_s - takes_s - now_s
        if start_s >= 0:
            prompts.append(Prompt(start_s, at, takes_s))
    prompts.sort()
    queued_s = sum(one.queued_tokens for one in workers) * token_s
    taken = _taken(prompts, queued_s, len(workers))
    first = [oldest[one.at] for one in prompts if one.at in taken]
    return first + in_order((one for at, one in enumerate(oldest) if at not in taken), now_s)


def _taken(prompts: Sequence[Prompt], queued_s: float, servers: int) -> set[int]:
    """Those that can be in time together, in this order, behind so much that is queued at the servers."""
    longest: list[tuple[float, int]] = []  # of those that are taken, as a heap
    for start_s, at, takes_s in prompts:
        heappush(longest, (-takes_s, at))
        if queued_s > start_s * servers:
            queued_s += heappop(longest)[0]
        queued_s += takes_s
    return {at for _, at in longest}


def _token_s(one: Worker) -> float:
    """Beside answers: each step of a prompt also takes what a step of answers alone does."""
    return one.token_s + (one.step_s / one.step_tokens if one.step_tokens else 0.0)
