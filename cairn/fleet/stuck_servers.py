"""Detection of servers that report healthy but send no tokens. Pure; the clock is an argument.

    streams there, nothing comes for `limit_s` and twice the time of the prompts that wait --> stuck: it rests
    something comes --> forgotten                                                   stuck again --> a longer rest

Whole answers come at their end, however long they take, so they prove progress and never its absence. Nor is a server
judged while requests of others wait there: it is not known here how long their prompts take.
"""

from typing import NamedTuple

from cairn.fleet.worker import Worker

PROMPTS = (
    2.0  # times as long as the prompts should take: steps are shared with requests that decode
)
MOST_DOUBLED = 5  # times


class Progress(NamedTuple):
    worker: Worker
    pieces: int  # that had come from it
    since_s: float
    rests: int  # in a row


class StuckServers:
    def __init__(self) -> None:
        self._seen: dict[int, Progress] = {}

    def rest_s(self, worker: Worker, streams: bool, limit_s: float, now_s: float) -> float | None:
        """Time to stop sending requests to a server that is stuck, or None. Polled a few times a second.

        `streams`: some there should be getting tokens.
        """
        seen = self._seen.get(worker.number)
        fresh = seen is None or seen.worker is not worker or seen.pieces != worker.pieces
        if fresh:
            self._seen[worker.number] = Progress(worker, worker.pieces, now_s, 0)
            return None
        assert seen is not None
        others = worker.load.waiting > worker.waiting
        if not streams or others or worker.state != "up" or now_s < worker.rests_until_s:
            self._seen[worker.number] = seen._replace(since_s=now_s)
            return None
        prompts_s = worker.queued_tokens * worker.token_s
        if now_s - seen.since_s < limit_s + PROMPTS * prompts_s:
            return None
        rests = min(seen.rests + 1, MOST_DOUBLED)
        self._seen[worker.number] = seen._replace(since_s=now_s, rests=rests)
        return limit_s * 2 ** (rests - 1)
