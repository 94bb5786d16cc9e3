"""Why did this request take as long as it did? One word of five, and a sentence with the numbers.

    queue    it waited: for a row, or again after a preemption
    host     tokenizing, answering, what the engine's loop did while its device was idle, and what its steps took
             far beyond their floor: starting many small operations, not doing them
    tail     one pause between two tokens was far longer than the others
    compute  steps that multiplying takes long for, mostly its prompt
    memory   steps that reading weights and keys takes long for, mostly its answer

Every second of the request is given to one of them; the largest is the reason. Pure: numbers in, words out.
"""

from typing import NamedTuple

from cairn.core.units import format_duration
from cairn.serve.http.ledger.views import Reason

PAUSE = 4.0  # times the usual time between two tokens, and it is a pause
# A loop that waits for its device for this share of its own work is not what holds it up.
HIDDEN = 0.1
FEW = 4  # tokens, of which none is unusual
REACH = 4.0  # times the floor: what a step may take that is held up by the device at all

SAYS: dict[Reason, str] = {
    "queue": "waiting for a place in the batch",
    "host": "work around the device: tokenizing, scheduling, starting operations, answering",
    "tail": "one pause between two tokens",
    "compute": "multiplying",
    "memory": "reading weights and keys",
}


class Phases(NamedTuple):
    """Seconds of one request, and what the floor consists of where it is known."""

    tokenize: float = 0.0
    queue: float = 0.0  # the decision to admit it included
    prefill: float = 0.0
    decode: float = 0.0
    respond: float = 0.0
    requeued: float = 0.0  # of prefill and decode: without a row after a preemption
    host: float = 0.0  # of prefill and decode: the loop's own work
    device: float = 0.0  # of prefill and decode: computing, or waiting for the device
    overlapped: bool = False  # the loop works while the device computes
    tokens: int = 0
    per_token: float | None = None
    longest: float = 0.0  # between two tokens
    prefill_bound: str = "compute"
    decode_bound: str = "memory"
    prefill_floor: float | None = None
    decode_floor: float | None = None

    @property
    def total(self) -> float:
        return self.tokenize + self.queue + self.prefill + self.decode + self.respond


def shares(phases: Phases) -> dict[Reason, float]:
    """Every second of the request, given to what it was spent on."""
    computing = phases.prefill + phases.decode
    queue = phases.queue + min(phases.requeued, computing)
    left = computing - min(phases.requeued, computing)
    tail = (
        min(_pause(phases), left) if not phases.requeued else 0.0
    )  # else the pause is the queue's
    left -= tail
    stolen = _host_share(phases) * left
    left -= stolen
    seconds_of: dict[Reason, float] = {
        "queue": queue,
        "host": phases.tokenize + phases.respond + stolen,
        "tail": tail,
        "compute": 0.0,
        "memory": 0.0,
    }
    of_prompt = phases.prefill / computing * left if computing > 0 else 0.0
    for bound, floor, seconds in (
        (phases.prefill_bound, phases.prefill_floor, of_prompt),
        (phases.decode_bound, phases.decode_floor, left - of_prompt),
    ):
        explained = seconds if floor is None else min(seconds, REACH * floor)
        seconds_of["compute" if bound == "compute" else "memory"] += explained
        seconds_of["host"] += seconds - explained
    return seconds_of


def reason_of(phases: Phases) -> tuple[Reason, str]:
    """The largest share, and what there is to say about it."""
    seconds_of = shares(phases)
    reason = max(seconds_of, key=seconds_of.__getitem__)
    part = seconds_of[reason] / phases.total if phases.total > 0 else 0.0
    sentence = f"{format_duration(seconds_of[reason])} of {format_duration(phases.total)} ({part:.0%}) {SAYS[reason]}"
    return reason, sentence + _distance(phases)


def _pause(phases: Phases) -> float:
    """The part of the longest time between two tokens that is unusual."""
    if phases.per_token is None or phases.tokens < FEW:
        return 0.0
    others = (phases.per_token * (phases.tokens - 1) - phases.longest) / (phases.tokens - 2)
    unusual = phases.longest > PAUSE * others
    return phases.longest - max(others, 0.0) if unusual else 0.0


def _host_share(phases: Phases) -> float:
    """Share of the engine's time in which the device was idle because of the host."""
    both = phases.host + phases.device
    if both <= 0 or (phases.overlapped and phases.device > HIDDEN * phases.host):
        return 0.0
    return phases.host / both


def _distance(phases: Phases) -> str:
    took = phases.prefill + phases.decode
    floor = (phases.prefill_floor or 0.0) + (phases.decode_floor or 0.0)
    if floor <= 0 or took <= 0:
        return ""
    return f"; in the engine {took / floor:.1f} times the floor of {format_duration(floor)}"
