"""State of a server in the router: availability, load, speed, and its requests in flight.

    starting --Hello--> up --silence, lost connection--> down --Hello--> up
                         |\\--draining (it says so): takes no new requests, finishes its own
                         '---asleep: its memory was given back; a request wakes it, or its host does

What the router has sent itself is counted at once; what the server tells (`Load`) includes others' requests and comes
a moment later. The larger of the two counts. No socket, no clock.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal
from urllib.parse import urlsplit

from cairn.fleet.decode_interference import Answers, UnderWay, answers_of
from cairn.fleet.routing_policy import Candidate
from cairn.serve.pulse import Hello, Load

State = Literal["starting", "up", "asleep", "draining", "down"]
STATES: dict[str, State] = {"ok": "up", "asleep": "asleep"}  # by what a server says of itself
STEP_S, TOKEN_S, ROW_S = 0.02, 25e-6, 1e-4  # of a server that has not told yet
LONGEST_S = 3600.0  # that a step may take
MOST_FAILURES = 3  # in a row, after which it is given a rest
REST_S = 1.0
LOST = "requests sent there were lost"
NO_LIMIT = 2**31
USUAL_ROWS = 256  # of a server that has not told


class Worker:
    def __init__(self, number: int, url: str, name: str = "") -> None:
        parts = urlsplit(url)
        self.number, self.url, self.name = number, url, name or f"server-{number}"
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        # Of its answers, up to the request's id.
        self.line = b"x-cairn-server: %b\r\nx-request-id: " % self.name.encode()
        self.state: State = "starting"
        self.reason = "it has not answered yet"
        self.hello: Hello | None = None
        self.models: frozenset[str] = frozenset()  # empty: it has not told, and may have any
        self.promised: tuple[str, ...] = ()  # what it will serve, as far as its host knows
        self.rows = USUAL_ROWS  # requests that it runs at a time
        self.step_tokens = 0  # of prompts, in a step beside answers; 0: it has not told
        self.load = Load()
        self.step_s, self.token_s, self.row_s = STEP_S, TOKEN_S, ROW_S  # as it has told, or usual
        self.queued_tokens = 0  # of prompts sent from here, before their first token
        self.waiting = 0  # requests of ours before their first token
        self.decoding = 0  # requests of ours after it
        self.stream_tokens = 0  # of prompts of streams among them
        self.requests = set[UnderWay]()  # of ours, before and after their first tokens
        self.failures = 0  # in a row
        self.rests_until_s, self.rest_reason = 0.0, LOST
        self.capacity = NO_LIMIT  # requests from here at a time
        self._sleeps = False  # as far as its host or its pulse has said
        self.managed = False  # a host of several models decides when it sleeps
        self.yielding = False  # it takes nothing new, to make room for another model
        self.sent = self.lost = self.continued = 0  # since the start
        self.pieces = 0  # of answers that have come, since the start

    def up(self, hello: Hello | None) -> None:
        """Mark the server as up. The same process (by epoch) keeps its sleep state; a new one is awake."""
        before, self.hello, self.failures = self.hello, hello, 0
        if before is None or hello is None or before.epoch != hello.epoch:
            self._sleeps = False
        self.state, self.reason = ("asleep", "asleep") if self._sleeps else ("up", "")
        self.models = frozenset(hello.models if hello is not None else ())
        rows = max(hello.rows, 0) if hello is not None else 0
        self.rows = rows or USUAL_ROWS
        self.step_tokens = max(hello.step_tokens, 0) if hello is not None else 0
        self.capacity = rows + (rows >> 3 or 1) if rows else NO_LIMIT
        self._note_load(Load())
        self.rests_until_s = 0.0

    def down(self, reason: str) -> None:
        self.state, self.reason = "down", reason

    def told(self, load: Load) -> None:
        self._note_load(load)
        if self.managed and load.status in STATES:
            return  # its host knows better: this may have been sent before it fell asleep
        if self.state in ("up", "asleep", "draining"):
            self.state = STATES.get(load.status, "draining")
            self._sleeps = self.state == "asleep"
            self.reason = "" if load.status == "ok" else load.status

    def _note_load(self, load: Load) -> None:
        """Store the reported load; missing or impossible times are replaced by defaults."""
        self.load = load
        self.step_s = load.step_s if 0 < load.step_s < LONGEST_S else STEP_S
        self.token_s = load.token_s if 0 < load.token_s < LONGEST_S else TOKEN_S
        self.row_s = load.row_s if 0 < load.row_s < LONGEST_S else ROW_S

    def fell_asleep(self) -> None:
        self.state, self.reason, self._sleeps = "asleep", "asleep", True

    def woke_up(self) -> None:
        self.state, self.reason, self._sleeps = "up", "", False

    def failed(self, now_s: float) -> None:
        """A request could not be sent or was lost: after several in a row it is left alone for a moment."""
        self.failures += 1
        self.lost += 1
        if self.failures >= MOST_FAILURES:
            self.rest(now_s + REST_S, LOST)

    def rest(self, until_s: float, reason: str) -> None:
        """Send no new requests until `until_s`, unless a longer pause is already set."""
        if until_s > self.rests_until_s:
            self.rests_until_s, self.rest_reason = until_s, reason

    def why(self, now_s: float) -> str:
        """Reason why the server gets no requests; empty if there is none."""
        return self.reason or (self.rest_reason if now_s < self.rests_until_s else "")

    def takes(self, new_tokens: int, streams: bool) -> None:
        """A prompt was sent there."""
        self.sent += 1
        self.waiting += 1
        self.queued_tokens += new_tokens
        if streams:
            self.stream_tokens += new_tokens

    def computed(self, new_tokens: int, streams: bool) -> None:
        """Its first token has come, or it was aborted."""
        self.waiting -= 1
        self.queued_tokens -= new_tokens
        if streams:
            self.stream_tokens -= new_tokens

    @property
    def answers(self) -> Answers:
        """Remaining answers of the current requests."""
        return answers_of(self.requests)

    @property
    def full(self) -> bool:
        """Return whether the server has its maximum of running requests plus a small backlog."""
        return self.waiting + self.decoding >= self.capacity


def eligible(
    workers: Iterable[Worker],
    now_s: float,
    model: str | None,
    state: State = "up",
    with_room: bool = False,
) -> list[Worker]:
    """Servers that may get a request for this model. A single loop, because a call per server is too expensive."""
    found: list[Worker] = []
    for one in workers:
        if one.state != state or now_s < one.rests_until_s or one.yielding:
            continue
        if with_room and one.waiting + one.decoding >= one.capacity:
            continue
        if model is None or not one.models or model in one.models:
            found.append(one)
    return found


def candidates(
    workers: Iterable[Worker],
    cached: Mapping[int, int],
    answers: Sequence[Answers] = (),
) -> list[Candidate]:
    """Policy inputs of the servers. `cached` is by server number, `answers` by position."""
    seen: list[Candidate] = []
    for at, one in enumerate(workers):
        load, decoding, waiting = one.load, one.decoding, one.waiting
        others = load.running - waiting
        seen.append(
            Candidate(  # in the order of its fields: names cost as much as the rest
                cached.get(one.number, 0),
                one.queued_tokens,
                decoding if decoding > others else others,
                waiting if waiting > load.waiting else load.waiting,
                one.rows,
                load.free_share,
                one.step_s,
                one.token_s,
                one.row_s,
                one.step_tokens,
                answers[at] if answers else None,
            )
        )
    return seen
