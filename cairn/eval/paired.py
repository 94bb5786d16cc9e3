"""Two models on the same documents: is one better, or were they lucky? Pure numpy.

    first.json (of `cairn eval A --json`)  +  the scores of B   ->   B - A, document by document, with a 95% interval

Documents are paired, so that hard ones count the same for both: the interval is one of the mean difference, from
resampling documents, and narrower than those of the two scores.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from cairn.core.errors import DataError
from cairn.eval.intervals import DRAWS
from cairn.eval.run import Difference, Evaluation, TaskResult

HINT = "both models have to see the same tasks with the same --limit, --shots and --chat"


def read_evaluation(path: Path) -> Evaluation:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Evaluation)
    except (OSError, msgspec.DecodeError) as error:
        raise DataError(
            f"{path} has no scores: {error}", hint="write them with `cairn eval MODEL --json`"
        ) from None


def differences(evaluation: Evaluation, other: Evaluation) -> list[Difference]:
    """Paired differences of every score that both models have for each document."""
    check_tasks([result.task for result in evaluation.tasks], other)
    known = {result.task: result for result in other.tasks}
    found = []
    for result in evaluation.tasks:
        found += _of_task(result, known[result.task])
    return found


def check_tasks(names: Sequence[str], other: Evaluation) -> None:
    """Refuses tasks that the other model has no scores of, which needs no model."""
    known = {result.task for result in other.tasks}
    for name in names:
        if name not in known:
            raise DataError(f"{other.model} has no scores of {name}", hint=HINT)


def _of_task(ours: TaskResult, theirs: TaskResult) -> list[Difference]:
    if len(ours.samples) != len(theirs.samples):
        raise DataError(
            f"{ours.task}: {len(ours.samples)} documents, and {len(theirs.samples)} before",
            hint=HINT,
        )
    for at, (one, other) in enumerate(zip(ours.samples, theirs.samples, strict=True)):
        if (one.prompt, one.expected) != (other.prompt, other.expected):
            raise DataError(f"{ours.task}: document {at} is another one", hint=HINT)
    pairs = list(zip(ours.samples, theirs.samples, strict=True))
    shared = [
        name for name in ours.metrics if all(name in b.scores for pair in pairs for b in pair)
    ]
    return [
        _difference(
            ours.task, name, [one.scores[name] - other.scores[name] for one, other in pairs]
        )
        for name in shared
    ]


def _difference(task: str, metric: str, by_document: Sequence[float]) -> Difference:
    values_N = np.asarray(by_document, float)
    places = np.random.default_rng(0).integers(0, len(values_N), (DRAWS, len(values_N)))
    low, high = np.percentile(values_N[places].mean(1), [2.5, 97.5])
    return Difference(
        task=task,
        metric=metric,
        value=float(values_N.mean()),
        low=float(low),
        high=float(high),
        better=int((values_N > 0).sum()),
        worse=int((values_N < 0).sum()),
    )
