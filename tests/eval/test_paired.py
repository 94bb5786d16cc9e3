"""Differences of two models, document by document; tasks of BIG-bench."""

import json

import pytest

from cairn.core.errors import DataError
from cairn.eval.intervals import share
from cairn.eval.paired import differences, read_evaluation
from cairn.eval.run import Evaluation, TaskResult
from cairn.eval.tasks.find import open_task
from cairn.eval.tasks.task import EvaluatedSample, TaskSettings


def scored(model, right):
    samples = [
        EvaluatedSample(prompt=f"q{at}", expected="a", answer="b", scores={"acc": float(one)})
        for at, one in enumerate(right)
    ]
    result = TaskResult(
        task="quiz",
        documents=len(right),
        metrics={"acc": share(right)},
        seconds=1.0,
        samples=samples,
    )
    return Evaluation(model=model, tasks=[result])


def test_pairs_show_what_two_intervals_hide():
    """Scores of 50 and 58% of 100 have intervals that overlap; if no document became worse, that is no chance."""
    first = [at % 2 == 0 for at in range(100)]
    second = [one or at % 12 == 1 for at, one in enumerate(first)]
    (found,) = differences(scored("b", second), scored("a", first))
    assert (found.better, found.worse) == (sum(second) - 50, 0)
    assert found.value == pytest.approx((sum(second) - 50) / 100)
    assert 0 < found.low < found.value < found.high
    assert found.verdict() == "better"
    (back,) = differences(scored("a", first), scored("b", second))
    assert (back.value, back.verdict()) == (pytest.approx(-found.value), "worse")
    (none,) = differences(scored("a", first), scored("a", first))
    assert (none.value, none.low, none.high, none.verdict()) == (0, 0, 0, "may be chance")


def test_other_documents_are_refused(tmp_path):
    with pytest.raises(DataError, match="quiz: 3 documents, and 4 before"):
        differences(scored("b", [1, 0, 1]), scored("a", [1, 0, 1, 1]))
    file = tmp_path / "no.json"
    file.write_text('{"a": 1}')
    with pytest.raises(DataError, match="has no scores"):
        read_evaluation(file)


def test_tasks_of_bigbench(tmp_path):
    folder = tmp_path / "colours"
    folder.mkdir()
    file = folder / "task.json"
    examples = [{"input": "Is grass green?", "target_scores": {"no": 0, "yes": 1}}] * 3
    file.write_text(json.dumps({"examples": examples, "task_prefix": "Answer."}, indent=2))
    task = open_task(str(file), TaskSettings(limit=2))
    assert task.name == "colours"
    assert [one.right for one in task.questions] == [1, 1]
    assert task.requests[0].context == "Answer.\nQ: Is grass green?\nA:"
    assert [one.continuation for one in task.requests[:2]] == [" no", " yes"]
    file.write_text(json.dumps({"examples": [{"input": "2+2", "target": ["4", "four"]}]}))
    task = open_task(str(file), TaskSettings())
    assert [(one.prompt, one.expected) for one in task.questions] == [("Q: 2+2\nA:", "4")]
    file.write_text(json.dumps({"examples": [{"input": "2+2"}]}))
    with pytest.raises(DataError, match="example 0 has neither target_scores nor target"):
        open_task(str(file), TaskSettings())
