"""Scores of a model on several tasks: the one place that joins tasks and a model.

for each task: requests -> the model -> results, in the same order -> metrics with intervals
"""

import time
from collections.abc import Callable, Sequence

import msgspec

from cairn.core.errors import DataError
from cairn.eval.intervals import ScoreMetric
from cairn.eval.requests import (
    EvaluatedModel,
    GenerateUntil,
    LogLikelihood,
    ProgressCallback,
    Request,
    Result,
    Rolling,
)
from cairn.eval.tasks.task import EvaluatedSample, EvaluationTask
from cairn.report.progress import Bar


class TaskResult(msgspec.Struct, frozen=True, kw_only=True):
    task: str
    documents: int
    metrics: dict[str, ScoreMetric]
    seconds: float
    samples: list[EvaluatedSample]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference of a score to the reference model's (`eval/paired.py`)."""

    task: str
    metric: str
    value: float
    low: float
    high: float
    better: int  # documents
    worse: int

    def verdict(self) -> str:
        if self.low <= 0 <= self.high:
            return "may be chance"
        return "better" if self.value > 0 else "worse"


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    tasks: list[TaskResult]
    against: str | None = None  # another model
    differences: list[Difference] = []


def evaluate(
    model: EvaluatedModel,
    tasks: Sequence[EvaluationTask],
    done: Callable[[TaskResult], None] = lambda result: None,
) -> Evaluation:
    """`done` is called with the result of each task as it comes."""
    results = []
    for task in tasks:
        results.append(_one(model, task))
        done(results[-1])
    return Evaluation(model=model.name, tasks=results)


def _one(model: EvaluatedModel, task: EvaluationTask) -> TaskResult:
    if not task.requests:
        raise DataError(f"the task {task.name} has no documents", hint="use a larger --limit")
    began = time.perf_counter()
    # The engine has a bar of its own, which counts tokens.
    shown = not isinstance(task.requests[0], GenerateUntil)
    with Bar(task.name, len(task.requests), shown=shown) as bar:
        results = answer(model, task.requests, bar.advance)
    scores = task.score(results)
    return TaskResult(
        task=task.name,
        documents=len(scores.samples),
        metrics=scores.metrics,
        seconds=time.perf_counter() - began,
        samples=scores.samples,
    )


def answer(
    model: EvaluatedModel, requests: Sequence[Request], advance: ProgressCallback
) -> list[Result]:
    """The results of requests, which are all of one kind, in their order."""
    likelihoods = [one for one in requests if isinstance(one, LogLikelihood)]
    rolling = [one for one in requests if isinstance(one, Rolling)]
    written = [one for one in requests if isinstance(one, GenerateUntil)]
    if likelihoods:
        return [*model.loglikelihood(likelihoods, advance)]
    if rolling:
        return [*model.rolling(rolling, advance)]
    return [*model.generate_until(written, advance)]
