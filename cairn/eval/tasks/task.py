"""Interface of a task: requests, results, and scores with intervals. No torch."""

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from cairn.core.errors import DataError
from cairn.eval.intervals import ScoreMetric
from cairn.eval.requests import Request, Result

SEED = 1234  # of the examples in a prompt, lm-eval's
Document = TypeVar("Document")


class EvaluatedSample(msgspec.Struct, frozen=True, kw_only=True):
    """A document and the model's answer."""

    prompt: str
    expected: str
    answer: str
    scores: dict[str, float]


class TaskScores(msgspec.Struct, frozen=True, kw_only=True):
    metrics: dict[str, ScoreMetric]
    samples: list[EvaluatedSample]


class EvaluationTask(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def requests(self) -> Sequence[Request]:
        """All of one kind, in the order of the documents."""
        ...

    def score(self, results: Sequence[Result]) -> TaskScores:
        """`results` in the order of `requests`."""
        ...


class TaskSettings(NamedTuple):
    """Options of a task; None keeps the task's default."""

    limit: int | None = None
    shots: int | None = None
    max_tokens: int | None = None
    chat: bool = False
    window: int = 0
    stride: int = 0


def examples(
    pool: Sequence[Document], shots: int, random: Random, but: Document | None = None
) -> list[Document]:
    """Solved documents for a prompt, drawn as lm-eval draws them; never the document `but` itself."""
    wanted = shots + (but is not None)
    if not shots:
        return []
    if wanted > len(pool):
        raise DataError(
            f"{shots} examples are wanted for each prompt, and there are {len(pool)} documents",
            hint="use fewer with --shots",
        )
    drawn = random.sample(list(pool), wanted)
    kept = [one for one in drawn if but is None or one != but][:shots]
    return kept if len(kept) == shots else random.sample([d for d in pool if d != but], shots)


def text_of(value: dict[str, Any], names: Sequence[str], where: str) -> str:
    """The first of these fields that is there, as text."""
    for name in names:
        if isinstance(value.get(name), str | int | float):
            return str(value[name])
    raise DataError(
        f"{where} has no field {' or '.join(names)}; it has: {', '.join(value) or 'none'}",
        hint="name the field as one of these",
    )
