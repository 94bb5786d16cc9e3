"""Tasks in lm-eval's YAML: prompts, choices and stops by hand, as its documentation has them."""

import json

import pytest

from cairn.core.errors import DataError
from cairn.eval.tasks.exact_match import ExactMatch
from cairn.eval.tasks.find import open_task
from cairn.eval.tasks.task import TaskSettings

DOCUMENTS = [
    {"question": "Is grass green?", "options": ["no", "yes"], "label": 1, "answer": "Yes."},
    {"question": "Is snow black?", "options": ["no", "yes"], "label": 0, "answer": "No."},
]
DATA = 'dataset_path: json\ndataset_kwargs: {data_files: {test: "docs.jsonl"}}\ntest_split: test\n'
CHOICE = (
    DATA
    + """
task: colours
output_type: multiple_choice
description: "Answer.\\n"
doc_to_text: "Q: {{question}}\\nA:"
doc_to_choice: options
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
)


@pytest.fixture
def written(tmp_path):
    (tmp_path / "docs.jsonl").write_text("\n".join(map(json.dumps, DOCUMENTS)))

    def write(text):
        file = tmp_path / "task.yaml"
        file.write_text(text)
        return str(file)

    return write


@pytest.mark.parametrize(
    ("choice", "target"),
    [
        ("options", "label"),
        ("'{{options}}'", "'{{label}}'"),
        ("['no', 'yes']", "'{{options[label]}}'"),
    ],
)
def test_multiple_choice(written, choice, target):
    text = CHOICE.replace("choice: options", f"choice: {choice}")
    task = open_task(written(text.replace("target: label", f"target: {target}")), TaskSettings())
    assert task.name == "colours"
    assert [one.right for one in task.questions] == [1, 0]
    assert task.requests[0].context == "Answer.\nQ: Is grass green?\nA:"
    assert [one.continuation for one in task.requests[:2]] == [" no", " yes"]


def test_solved_examples_and_the_delimiter(written):
    text = CHOICE + 'num_fewshot: 1\ntarget_delimiter: ""\n'
    task = open_task(written(text), TaskSettings(limit=1))
    shown = "Answer.\nQ: Is snow black?\nA:no\n\nQ: Is grass green?\nA:"
    assert [one.context for one in task.requests] == [shown, shown]
    assert [one.continuation for one in task.requests] == ["no", "yes"]


def test_generation(written):
    text = DATA + "doc_to_text: question\ndoc_to_target: answer\noutput_type: generate_until\n"
    text += 'generation_kwargs: {until: ["\\n"], max_gen_toks: 9, do_sample: false}\n'
    task = open_task(
        written(text + "metric_list: [{metric: exact_match, ignore_case: true}]"), TaskSettings()
    )
    assert isinstance(task, ExactMatch)
    asked = task.requests[0]
    assert (asked.context, tuple(asked.until), asked.max_tokens) == ("Is grass green?", ("\n",), 9)
    assert task.score(["yes.", "maybe"]).metrics["exact_match"].value == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHOICE + "filter_list: []", "has filter_list, which is not understood"),
        (CHOICE + "process_docs: !function utils.f", "is no task"),
        (CHOICE.replace("acc_norm", "brier_score"), "no metric brier_score"),
        (CHOICE.replace("{{question}}", "{{query}}"), "'query' is undefined"),
        (CHOICE.replace("path: json", "path: ai2_arc"), "dataset_path is ai2_arc"),
        (CHOICE.replace("test_split: test", "test_split: dev"), "data_files has no dev"),
        (CHOICE.replace("doc_to_target: label", ""), "has no doc_to_target"),
        ("- 1", "is no task"),
    ],
)
def test_what_is_not_understood_is_named(written, text, said):
    with pytest.raises(DataError, match=said):
        open_task(written(text), TaskSettings())
