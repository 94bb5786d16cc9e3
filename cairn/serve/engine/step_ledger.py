"""The accounts of an engine's loop: where the time of each step went, and what was computed for each request.

    Turn          when each phase of one turn of the loop ended
    StepLedger    totals and the newest steps; stamps the ledgers of requests as they are scheduled, begin and end

A turn launches one step and lands another in the overlapped form: tokens are counted with the step that landed, and
`times` names the one that was launched. Reads no clock; the loop passes moments of its own.
"""

from collections import deque

import msgspec

from cairn.serve.engine.request import Request
from cairn.serve.engine.step import Step
from cairn.serve.engine.step_times import NOTHING, Spent, StepTimes

REMEMBERED = 4096  # steps in `times`


class Turn(msgspec.Struct, gc=False):
    """Moments of the loop's clock, in their order."""

    began: float
    scheduled: float = 0.0
    launched: float = 0.0
    waited: float = 0.0
    ended: float = 0.0

    @property
    def schedule(self) -> float:
        return self.scheduled - self.began

    @property
    def launch(self) -> float:
        return self.launched - self.scheduled

    @property
    def wait(self) -> float:
        return self.waited - self.launched

    @property
    def update(self) -> float:
        return self.ended - self.waited


class StepLedger:
    def __init__(self) -> None:
        self.times: deque[StepTimes] = deque(maxlen=REMEMBERED)
        self.spent = NOTHING  # of all steps that have landed, and the time that they took
        self._updating = 0.0  # seconds of the last update: the next turn counts them

    def stamp(self, step: Step, turn: Turn) -> None:
        """A step was scheduled: some requests got a row, others lost it."""
        for request in step.preempted:
            if request.ledger.scheduled:
                request.ledger.requeued -= turn.scheduled
        for request in step.admitted:
            ledger = request.ledger
            if ledger.scheduled == 0.0:
                ledger.admitting, ledger.scheduled = turn.began, turn.scheduled
                request.mark = self.spent
            elif ledger.requeued < 0:
                ledger.requeued += turn.scheduled

    def spend(self, landed: Step | None, turn: Turn, on_cpu: bool) -> None:
        """Add a turn to the totals, with the step that has landed in it. A CPU computes in `launch`."""
        spent = self.spent
        host = spent.host + turn.schedule + self._updating + (0.0 if on_cpu else turn.launch)
        device = spent.device + turn.wait + (turn.launch if on_cpu else 0.0)
        if landed is None:
            self.spent = spent._replace(host=host, device=device)
            return
        self.spent = Spent(
            spent.steps + 1,
            spent.tokens + landed.tokens,
            spent.prefill + landed.prefill,
            spent.sampled + len(landed.sampling),
            spent.read + landed.read,
            spent.pairs + landed.pairs,
            host,
            device,
        )

    def accepted(self, drafts: int) -> None:
        """Drafts that the last step verified have held, which `spend` could not know."""
        self.spent = self.spent._replace(sampled=self.spent.sampled + drafts)

    def remember(self, launched: Step, turn: Turn) -> None:
        """The turn has ended."""
        self._updating = turn.update
        self.times.append(
            StepTimes(
                launched.number,
                len(launched.chunks),
                launched.tokens,
                turn.schedule,
                turn.launch,
                turn.wait,
                turn.update,
                turn.ended,
                launched.prefill,
                len(launched.sampling),
                launched.read,
                launched.pairs,
            )
        )

    def first_token(self, request: Request, now: float) -> None:
        request.ledger.first_token = now
        request.ledger.prefill = self.spent.since(request.mark)
        request.mark = self.spent

    def close(self, request: Request, now: float) -> None:
        """The last lines of a request's ledger."""
        ledger = request.ledger
        ledger.finished = now
        if ledger.requeued < 0:  # it ended without a row
            ledger.requeued += now
        if ledger.first_token:
            ledger.decode = self.spent.since(request.mark)
        elif ledger.scheduled:
            ledger.prefill = self.spent.since(request.mark)
