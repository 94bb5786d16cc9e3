"""Prompt lookup: what followed the last tokens when they stood in the text before will follow them again. Pure Python.

    .. def load(path): .. | def load(            the longest match decides, of equally long ones the newest
           ^^^^^^^^^^ path ):                     drafts: what followed it there

Costs nothing on the device. Good where an answer repeats its prompt or itself: edits, code, summaries with quotes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cairn.serve.engine.speculate.acceptance import (
    LONG_MATCH,
    MATCH,
    SHORT_MATCH,
    kind_of_match,
)
from cairn.serve.engine.speculate.drafter import Ask, Drafts
from cairn.serve.engine.speculate.own_texts import OwnTexts, tail_of

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request


class NgramDrafter:
    kinds = (SHORT_MATCH, MATCH, LONG_MATCH)

    def __init__(self) -> None:
        self._texts = OwnTexts()

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._propose(ask) for ask in asks]

    def finish(self, request: "Request") -> None:
        self._texts.pop(request)

    def _propose(self, ask: Ask) -> list[int]:
        own = self._texts.of(ask.request)
        tail = tail_of(own, ask)
        places = own.index.matches(tail)
        if not places:
            return []
        best = max(places, key=lambda place: place.length)  # the first of the longest is the newest
        return Drafts(copied(best.text, best.at, ask), kind_of_match(best.length))


def copied(text: Sequence[int], at: int, ask: Ask) -> list[int]:
    """The continuation of `text` from `at`; beyond its end it repeats periodically."""
    known = list(text[at : at + ask.most])
    if len(known) < ask.most:
        known += ask.hoped
    while len(known) < ask.most:
        known += known
    return known[: ask.most]
