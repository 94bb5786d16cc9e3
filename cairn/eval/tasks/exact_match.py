"""Questions with one right answer: the model writes, a filter finds its answer, and the two are compared.

    "Natalia sold ... #### 72"  --strict: '#### (-?[0-9.,]+)'-->  72   ==   72

Filters and normalisation follow lm-eval's `regex`, `take_first` and `exact_match`, so that scores are the same on the
same answers.
"""

import re
import string
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cairn.eval.intervals import share
from cairn.eval.requests import GenerateUntil, Result
from cairn.eval.tasks.task import EvaluatedSample, TaskScores

INVALID = "[invalid]"  # what a filter gives that finds nothing


class Filter(NamedTuple):
    """Extraction of the answer from a text: the match at index `select`, and its first group with text."""

    pattern: str | None = None  # None: the whole text
    select: int = 0

    def extract(self, text: str) -> str:
        if self.pattern is None:
            return text.strip()
        matches = re.findall(self.pattern, text)
        if not matches:
            return INVALID
        match = matches[self.select]
        if isinstance(match, tuple):
            match = next((group for group in match if group), INVALID)
        return match.strip()


class Equality(NamedTuple):
    """When two answers count as the same."""

    ignored: tuple[str, ...] = ()  # regular expressions whose matches are removed from both
    ignore_case: bool = False
    ignore_punctuation: bool = False

    def holds(self, answer: str, expected: str) -> bool:
        return self.normal(answer) == self.normal(expected)

    def normal(self, text: str) -> str:
        for pattern in self.ignored:
            text = re.sub(pattern, "", text)
        text = text.lower() if self.ignore_case else text
        table = str.maketrans("", "", string.punctuation)
        return text.translate(table) if self.ignore_punctuation else text


class Question(NamedTuple):
    prompt: str
    expected: str


class ExactMatch:
    """A metric for each filter: its share of right answers."""

    def __init__(
        self,
        name: str,
        questions: Sequence[Question],
        filters: Mapping[str, Filter],
        equality: Equality,
        until: Sequence[str],
        max_tokens: int,
        chat: bool = False,
    ) -> None:
        self.name, self.questions = name, list(questions)
        self.filters, self.equality = dict(filters), equality
        self.requests = [
            GenerateUntil(question.prompt, tuple(until), max_tokens, chat) for question in questions
        ]

    def score(self, results: Sequence[Result]) -> TaskScores:
        samples = [
            self._sample(question, str(text))
            for question, text in zip(self.questions, results, strict=True)
        ]
        metrics = {
            name: share([sample.scores[name] for sample in samples]) for name in self.filters
        }
        return TaskScores(metrics=metrics, samples=samples)

    def _sample(self, question: Question, text: str) -> EvaluatedSample:
        scores = {
            name: float(self.equality.holds(filter.extract(text), question.expected))
            for name, filter in self.filters.items()
        }
        return EvaluatedSample(
            prompt=question.prompt, expected=question.expected, answer=text, scores=scores
        )
