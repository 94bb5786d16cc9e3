"""Five times what the server can do: every request is answered or refused at once, and the engine is never idle.

How good the admission is, is found on a clock of its own: the same rules, arrivals at random, no machine in the way.
`benchmarks/overload.py` runs the same against the wall clock for a minute.
"""

import asyncio
import heapq
import random
from collections import deque

import httpx
import paced_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import wait_until

from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.admission import Admission, Rules

ROWS, WAITING, TOKENS, SENT = 8, 16, 12, 240


def test_everybody_is_answered_or_told_to_come_again_and_no_row_is_idle(tiny_folder):
    with paced_tiny.paced(tiny_folder, ROWS, 0.004, max_waiting=WAITING) as server:
        taken = []  # rows of each step in which somebody waited
        step, scheduler = server.engine.step, server.engine.scheduler

        def watched():
            waited = scheduler.waiting > 0
            outputs = step()
            if waited:
                taken.append(len(outputs))
            return outputs

        server.engine.step = watched
        answers = asyncio.run(_ask_at_once(server.url))
        ends = [answer.status_code for answer in answers]
        assert len(ends) == SENT
        assert set(ends) <= {200, 429, 503}
        assert ends.count(200) >= ROWS + WAITING  # those that fit, whenever they came
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["usage"]["completion_tokens"] == TOKENS
                assert answer.json()["choices"][0]["finish_reason"] == "length"
            else:
                assert int(answer.headers["retry-after"]) >= 1
        assert sum(taken) >= 0.9 * ROWS * len(taken)
        wait_until(lambda: not server.service.open and not server.engine.has_work)
        assert server.service.admission.inside == server.service.admission.waiting == 0
        assert scheduler.blocks.usage().used == 0


async def _ask_at_once(url):
    body = dict(prompt="Once upon", max_tokens=TOKENS, ignore_eos=True)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as client:
        asked = [client.post("/v1/completions", json=body) for _ in range(SENT)]
        return await asyncio.gather(*asked)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(4, 24),
    service_s=st.floats(0.5, 4.0),
    deadline_s=st.floats(4.0, 20.0),
    times=st.floats(2.0, 6.0),
    seed=st.integers(0, 99),
)
def test_under_overload_the_engine_stays_busy_and_hardly_anybody_waits_in_vain(
    rows, service_s, deadline_s, times, seed
):
    """Answers take between half and one and a half times `service_s`; the first token comes with the row."""
    world = World(Rules(rows=rows, waiting=1024, first_token_s=deadline_s), service_s, seed)
    seconds = 10 * (service_s + deadline_s)
    world.run(rate=times * rows / service_s, seconds=seconds)
    assert world.busy_s >= 0.9 * rows * seconds
    assert max(world.waits) <= deadline_s
    unknown = times * rows  # come before an answer has ended, which tells how the line moves
    assert world.in_vain <= 0.05 * len(world.waits) + unknown


class World:
    """A server's line and rows, event by event."""

    def __init__(self, rules, service_s, seed):
        self.rules, self.service_s, self.draw = rules, service_s, random.Random(seed)
        self.now, self.busy_s = 0.0, 0.0
        self.admission = Admission(rules, lambda: self.now)
        self.line, self.ends, self.waits = deque(), [], []
        self.in_vain = 0  # were let in, and their deadline passed

    def run(self, rate, seconds):
        coming = self.draw.expovariate(rate)
        while coming < seconds:
            while self.ends and self.ends[0][0] <= coming:
                self._leave()
            self.now = coming
            self._arrive()
            coming += self.draw.expovariate(rate)

    def _arrive(self):
        try:
            ticket = self.admission.admit("anybody", 1)
        except Refusal:
            return
        self.line.append((self.now, ticket))
        self._begin()

    def _leave(self):
        self.now, _, ticket = heapq.heappop(self.ends)
        ticket.close()
        self._begin()

    def _begin(self):
        while self.line and len(self.ends) < self.rules.rows:
            arrived, ticket = self.line.popleft()
            if self.now - arrived > self.rules.first_token_s:  # it was ended then
                ticket.close()
                self.in_vain += 1
                continue
            self.waits.append(self.now - arrived)
            ticket.first_token()
            took = self.service_s * self.draw.uniform(0.5, 1.5)
            self.busy_s += took
            heapq.heappush(self.ends, (self.now + took, len(self.waits), ticket))
