"""Suffix matching: what most often followed the last tokens, in the request's own text and in finished answers.

    for each length p of a match with the last tokens:
        follow the most frequent next token, again and again; probability = product of count(next) / count(here)
        at most p drafts, while the probability is at least a tenth; score = sum of the probabilities
    the draft with the largest score is proposed                                          (arXiv:2411.04975)

Longer matches are rarer and surer, so they may propose more. Answers that have finished are kept, the newest ones, so
that agents and batches that say nearly the same again are drafted from the start. Pure Python.
"""

from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cairn.serve.engine.speculate.acceptance import (
    LONG_MATCH,
    MATCH,
    SHORT_MATCH,
    kind_of_match,
)
from cairn.serve.engine.speculate.drafter import Ask, Drafts
from cairn.serve.engine.speculate.occurrences import Occurrences, Place
from cairn.serve.engine.speculate.own_texts import OwnTexts, tail_of

if TYPE_CHECKING:
    from cairn.serve.engine.request import Request

LEAST_PROBABILITY = 0.1  # of a draft, as the product of counts
MOST_FINISHED = 262_144  # tokens of finished answers that are kept


class Draft(NamedTuple):
    score: float  # tokens that are expected to hold
    tokens: list[int]
    match: int = 0  # tokens


NOTHING = Draft(0.0, [])


class FinishedAnswers:
    """Outputs of requests that have ended, the newest ones."""

    def __init__(self, most: int = MOST_FINISHED) -> None:
        self.most, self.tokens = most, 0
        self.index = Occurrences()
        self._texts: deque[list[int]] = deque()

    def add(self, text: list[int]) -> None:
        self._texts.append(text)
        self.tokens += len(text)
        self.index.index(text, 0)
        while self.tokens > self.most:
            oldest = self._texts.popleft()
            self.tokens -= len(oldest)
            self.index.forget(oldest)


class SuffixDrafter:
    kinds = (SHORT_MATCH, MATCH, LONG_MATCH)

    def __init__(self, most_finished: int = MOST_FINISHED) -> None:
        self._texts = OwnTexts()
        self.finished = FinishedAnswers(most_finished)

    def propose(self, asks: Sequence[Ask]) -> list[list[int]]:
        return [self._propose(ask) for ask in asks]

    def finish(self, request: "Request") -> None:
        """Its answer may come again. One with a salt shares nothing with others, so it is not kept."""
        if self._texts.pop(request) is not None and not request.salt:
            self.finished.add(list(request.outputs))

    def _propose(self, ask: Ask) -> list[int]:
        own = self._texts.of(ask.request)
        tail = tail_of(own, ask)
        best = best_draft(own.index.matches(tail), ask.most)
        if not ask.request.salt:
            others = best_draft(self.finished.index.matches(tail), ask.most)
            best = others if others.score > best.score else best
        return Drafts(best.tokens, kind_of_match(best.match))


def best_draft(places: Sequence[Place], most: int) -> Draft:
    """The draft with the most expected accepted tokens over all match lengths."""
    best = NOTHING
    for length in sorted({place.length for place in places}):
        matching = [place for place in places if place.length >= length]
        draft = likeliest(matching, min(most, length))._replace(match=length)
        best = draft if draft.score > best.score else best
    return best


def likeliest(places: Sequence[Place], most: int) -> Draft:
    """Follow the most frequent next token behind these places; of equally frequent ones that of the newest place."""
    tokens: list[int] = []
    score, probability = 0.0, 1.0
    while len(tokens) < most:
        depth = len(tokens)
        nexts = Counter(p.text[p.at + depth] for p in places if p.at + depth < len(p.text))
        if not nexts:
            break
        token, count = nexts.most_common(1)[0]
        probability *= count / len(places)
        if probability < LEAST_PROBABILITY:
            break
        score += probability
        tokens.append(token)
        places = [p for p in places if p.at + depth < len(p.text) and p.text[p.at + depth] == token]
    return Draft(score, tokens)
