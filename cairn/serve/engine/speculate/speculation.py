"""Speculation between scheduler and drafter: proposals and their results. Pure Python; knows no blocks or budget.

    plan --> drafts for the next step, and a guess of what is drawn behind them --land--> which tokens hold

`schedule` may run ahead of `update`, so a drafter is often asked while tokens are in flight. It is asked with what is
hoped for instead: `Request.hoped` is its guess of the first of `Request.expected` tokens. When a step lands otherwise
than hoped, drafts that follow it are most likely rejected, and the drafter starts again from what is known. Where it
`waits`, no step follows one with drafts before that has landed: few tokens in flight are known well enough to draft
behind them, and those of a step without drafts still overlap.

With `on_device`, the device drafts in the step that verifies (`kernels.draft_ngrams`), and the host only chooses how
many: nothing is waited for, and the host learns the drafts when they land. Requests that are `special` are still
drafted by the host, each when its own drafts in flight have landed.

A drafter that raises is asked no more: requests go on without its drafts, and their answers are the same.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cairn.core.errors import ConfigError
from cairn.serve.engine.request import DRAFTED, special
from cairn.serve.engine.speculate.acceptance import ANY, FORCED, Acceptance, Counts, Kind
from cairn.serve.engine.speculate.controller import Prospect, Seconds, choose_drafts
from cairn.serve.engine.speculate.drafter import (
    Ask,
    Drafter,
    Drafts,
    accepted,
    kind_of,
    kinds_of,
)
from cairn.serve.engine.speculate.head_pace import HeadPace

if TYPE_CHECKING:
    from cairn.serve.engine.request import Limits, Request
    from cairn.serve.engine.step import Step

NO_DRAFTS: tuple[int, ...] = ()
# Which tokens a request gets, of those that were drawn behind its last token and behind each of its drafts.
Accept = Callable[["Request", Sequence[int], Sequence[int]], list[int]]


class Planned(NamedTuple):
    """Drafts of a request for the next step."""

    guesses: Sequence[int]  # of the tokens that it draws
    drafts: int  # so many of them are verified
    kind: Kind = ANY  # what they rest on


NOTHING = Planned(NO_DRAFTS, 0)


class Speculation:
    def __init__(
        self,
        drafter: Drafter,
        *,
        seconds: Seconds | None = None,
        widths: Sequence[int] = (),
        wait_s: float = 0.0,
        waits: bool = False,
        on_device: bool = False,
        pace: HeadPace | None = None,
        on_failure: Callable[[Exception], None] | None = None,
    ) -> None:
        """`seconds`: of a step, by which the number of drafts is chosen; None: as many as are proposed.

        `widths` and `wait_s`: as `choose_drafts` takes them. `pace`: says when a head drafts; None: always.
        `on_failure`: is called with what the drafter raised; None: it is raised.
        """
        self.drafter, self.waits, self.on_device = drafter, waits, on_device
        self.seconds, self.widths, self.wait_s, self.pace = seconds, widths, wait_s, pace
        self.counts = Counts()
        self.accept: Accept = _drawn_as_drafted
        self.failed = False  # the drafter has raised, and is asked no more
        self._on_failure = on_failure
        self._acceptance: dict[Request, dict[Kind, Acceptance]] = {}
        self._planned: dict[Request, Planned] = {}
        self._launched: dict[Request, Kind] = {}  # of the newest drafts
        self._for_others = NOTHING  # planned for a request that `_planned` does not have
        self.head_guesses = True  # may be verified in the newest step

    def plan(self, decoding: Sequence["Request"], most: int) -> None:
        """Ask for drafts of all requests that the next step may decode, and choose how many of them it verifies."""
        self._planned.clear()
        self._for_others = NOTHING
        decoding = [request for request in decoding if request.params.pooling is None]
        if not decoding or (self.failed and not self.on_device):
            return
        alike = self.on_device and not any(map(special, decoding))
        self.head_guesses = self.pace is None or self.pace.verifies(decoding)
        if alike and not self.head_guesses:
            return
        if alike and self.pace is not None:
            for request in decoding:
                if count := self._head_drafts(request, len(decoding), most):
                    self._planned[request] = Planned((DRAFTED,) * most, count)
            return
        if alike and self.seconds is None:
            # So it is in every step of many requests: nothing is stored for each of them.
            self._for_others = Planned((DRAFTED,) * most, most)
            return
        rooms = [max(min(most, request.end - request.total - 1), 0) for request in decoding]
        counts = self._choose(rooms, [self._hope(request) for request in decoding])
        if not any(counts):
            return  # whatever is proposed
        if alike:
            planned = [Planned((DRAFTED,) * most, count) for count in counts]
        else:
            planned = self._ask_for(decoding, rooms, most)
        for request, own in zip(decoding, planned, strict=True):
            if own.guesses:
                self._planned[request] = own

    def _ask_for(
        self, decoding: Sequence["Request"], rooms: Sequence[int], most: int
    ) -> list[Planned]:
        """Proposed tokens of each request, or placeholders (DRAFTED) for drafts on the device."""
        asks = [_ask(request, most) for request in decoding if self.drafts_on_host(request)]
        proposed, found = self._propose(asks), {}
        for ask, own in zip(asks, proposed, strict=True):
            found[ask.request] = _behind(ask.request, own[: ask.most]), kind_of(own)
        guesses = []
        for request in decoding:
            count = self._head_drafts(request, len(decoding), most)
            guesses.append(found.get(request, ((DRAFTED,) * count, ANY)))
        fitting = [min(len(own), room) for (own, _), room in zip(guesses, rooms, strict=True)]
        chances = [self.rate(r, kind) for r, (_, kind) in zip(decoding, guesses, strict=True)]
        counts = self._choose(fitting, chances)
        return [Planned(own, n, kind) for (own, kind), n in zip(guesses, counts, strict=True)]

    def _head_drafts(self, request: "Request", requests: int, most: int) -> int:
        """Maximum number of device drafts to verify in a step of this many requests."""
        if self.pace is None:
            return most
        return min(self.pace.guesses(request, requests), most) if self.head_guesses else 0

    def drafts_on_host(self, request: "Request") -> bool:
        return not self.on_device or special(request)

    def must_land(self, request: "Request") -> bool:
        """Is it scheduled only when its drafts in flight have landed?"""
        return request.drafted > 0 and self.on_device and special(request)

    def _choose(self, proposed: Sequence[int], chances: Sequence[float]) -> Sequence[int]:
        """Number of drafts of each request to verify; all of them without a step-time model."""
        if self.seconds is None or not any(proposed):
            return proposed
        prospects = [Prospect(chance, n) for chance, n in zip(chances, proposed, strict=True)]
        return choose_drafts(prospects, self.seconds, self.widths, self.wait_s)

    def planned(self, request: "Request") -> Planned:
        return self._planned.get(request, self._for_others)

    def rate(self, request: "Request", kind: Kind = ANY) -> float:
        """The chance that its next draft of this kind holds."""
        return self._acceptance.setdefault(request, {}).setdefault(kind, Acceptance(kind)).rate

    def _hope(self, request: "Request") -> float:
        """The best chance that drafts may have which are not proposed yet."""
        kinds = kinds_of(self.drafter) if self.drafts_on_host(request) else (ANY,)
        if request.constraint is not None:
            kinds = (*kinds, FORCED)
        return max((self.rate(request, kind) for kind in kinds), default=0.0)

    def launch(self, request: "Request", drafts: int, guesses: Sequence[int] = ()) -> None:
        """A step draws a token for the request, and one behind each draft; `guesses` of all, as far as known."""
        if DRAFTED not in guesses:
            request.hoped += guesses[: 1 + drafts]
        request.expected += 1 + drafts
        request.drafted += drafts
        request.steps_in_flight += 1
        if drafts:
            self._launched[request] = self.planned(request).kind
            if self.pace is not None and not self.drafts_on_host(request):
                self.pace.launched(request, drafts)

    def land(self, step: "Step", drawn: Sequence[int]) -> Iterator[tuple["Request", int]]:
        """Each request with each of its tokens that hold; what was computed for the others is given back.

        That happens before a request's first token is yielded, so the caller has to take them all; it may end requests
        meanwhile.
        """
        drafts, at = step.drafts or [NO_DRAFTS] * len(step.sampling), 0
        tokens = 0
        for request, guessed in zip(step.sampling, drafts, strict=True):
            end = at + 1 + len(guessed)
            run = self.accept(request, drawn[at:end], guessed)
            self._settle(request, run, end - at - 1)
            at = end
            tokens += len(run)
            for token in run:
                yield request, token
        self._note_head(step, tokens)

    def _note_head(self, step: "Step", tokens: int) -> None:
        """Steps with prompts or with drafts of the host say nothing about a head."""
        requests = step.sampling
        if self.pace is None or step.took is None or not requests or any(map(special, requests)):
            return
        trial = self.pace.trial(len(requests))
        trial.note(step.guesses, bool(step.drafts), *step.took, tokens / len(requests))

    def finish(self, request: "Request") -> None:
        """The request has ended."""
        self._acceptance.pop(request, None)
        self._launched.pop(request, None)
        if self.pace is not None:
            self.pace.finish(request)
        if not self.failed:
            try:
                self.drafter.finish(request)
            except Exception as problem:  # noqa: BLE001  as in `_propose`
                self._fail(problem)

    def _propose(self, asks: Sequence[Ask]) -> Sequence[Sequence[int]]:
        if self.failed:
            return [NO_DRAFTS] * len(asks)
        try:
            proposed = self.drafter.propose(asks)
            return [
                own if isinstance(own, Drafts) else list(own)
                for own, _ in zip(proposed, asks, strict=True)
            ]
        except Exception as problem:  # noqa: BLE001  whatever it was, answers do not depend on drafts
            self._fail(problem)
            return [NO_DRAFTS] * len(asks)

    def _fail(self, problem: Exception) -> None:
        if self._on_failure is None:
            raise problem
        self.failed = True
        self._on_failure(problem)

    def _settle(self, request: "Request", run: list[int], drafts: int) -> None:
        tokens = len(run)
        held, rejected = tokens - 1, 1 + drafts - tokens
        self.counts.note(drafts, held)
        if drafts and self.pace is not None and not self.drafts_on_host(request):
            self.pace.landed(request, held)
        if request.state != "finished":
            ledger = request.ledger
            ledger.drafted += drafts
            ledger.accepted += held
            kind = self._launched.get(request, ANY)
            for own in self._acceptance.get(request, {}).values():
                own.note(*((drafts, held) if own.kind is kind else (0, 0)))
        request.total -= rejected
        if request.state == "running":
            request.computed -= rejected
        request.drafted -= drafts
        request.steps_in_flight -= 1
        if not rejected and request.hoped and request.hoped[:tokens] == run:
            del request.hoped[:tokens]
            request.expected -= tokens
        else:  # what was hoped for behind it does not follow; each step brings at least a token
            request.hoped.clear()
            request.expected = request.steps_in_flight


def _drawn_as_drafted(request: "Request", drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    return accepted(drawn, drafts)


def _ask(request: "Request", most: int) -> Ask:
    """Also for what is in flight and was not guessed yet, and for the token behind the last draft."""
    unguessed = request.expected - len(request.hoped)
    room = min(most, request.end - request.total - 1)
    return Ask(request, request.hoped, unguessed + max(room, 0) + 1)


def _behind(request: "Request", proposed: Sequence[int]) -> Sequence[int]:
    """The drafts after the tokens in flight; tokens in flight without a draft get one."""
    unguessed = request.expected - len(request.hoped)
    if len(proposed) < unguessed:
        return NO_DRAFTS
    request.hoped += proposed[:unguessed]
    return proposed[unguessed:]


def check_drafts(limits: "Limits") -> None:
    """Refuse drafts for layers that cannot go back behind those that do not hold."""
    if limits.drafts and any(group.kind == "state" for group in limits.groups):
        raise ConfigError(
            f"a step verifies {limits.drafts} drafts, and layers of this model keep a state",
            hint="a state cannot go back behind drafts that do not hold; serve it without a drafter",
        )
