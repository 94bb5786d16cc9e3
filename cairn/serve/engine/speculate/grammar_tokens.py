"""Drafts of requests with a grammar: what it leaves no choice about, and of other drafts what it allows. Pure Python.

    {"name": "Ada", "age"              after the comma a schema knows every letter up to the next value

A grammar forces text, not tokens: the model may spell it otherwise, so forced tokens are verified like any drafts.
Requests without a grammar are drafted by another drafter, if there is one.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.serve.engine.speculate.acceptance import FORCED
from cairn.serve.engine.speculate.drafter import Ask, Drafter, Drafts, kind_of, kinds_of

if TYPE_CHECKING:
    from cairn.serve.engine.constraint import Constraint
    from cairn.serve.engine.request import Request


class GrammarDrafter:
    def __init__(self, others: Drafter | None = None) -> None:
        self.others, self.kinds = others, kinds_of(others)

    def propose(self, asks: Sequence[Ask]) -> list[Sequence[int]]:
        drafts: list[Sequence[int]] = [() for _ in asks]
        open_asks = []
        for at, ask in enumerate(asks):
            drafts[at] = forced_tokens(ask)
            if not drafts[at]:
                open_asks.append(at)
        if self.others is not None and open_asks:
            proposed = self.others.propose([asks[at] for at in open_asks])
            for at, tokens in zip(open_asks, proposed, strict=True):
                drafts[at] = _allowed(asks[at].request.constraint, tokens)
        return drafts

    def finish(self, request: "Request") -> None:
        if self.others is not None:
            self.others.finish(request)


def forced_tokens(ask: Ask) -> Sequence[int]:
    """A request with a grammar is scheduled when all its tokens are known, so nothing is hoped for before them."""
    constraint = ask.request.constraint
    if constraint is None or ask.hoped:
        return ()
    return Drafts(constraint.forced()[: ask.most], FORCED)


def _allowed(constraint: "Constraint | None", tokens: Sequence[int]) -> Sequence[int]:
    """The leading tokens that the grammar accepts; later ones could not be sampled."""
    if constraint is None:
        return tokens
    return Drafts(tokens[: constraint.followed(tokens)], kind_of(tokens))
