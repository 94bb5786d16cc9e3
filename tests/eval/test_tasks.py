"""Tasks without a model: prompts out, answers in, scores."""

import codecs
import gzip
import json
import math
from pathlib import Path

import pytest
from shared_data import shared

from cairn.compress.calibration import token_ids
from cairn.core.errors import DataError, UsageError
from cairn.eval.requests import Likelihood
from cairn.eval.run import evaluate
from cairn.eval.tasks import gsm8k
from cairn.eval.tasks.exact_match import INVALID, Equality, Filter
from cairn.eval.tasks.find import open_task
from cairn.eval.tasks.task import TaskSettings

STRICT, FLEXIBLE = (
    gsm8k.FILTERS[f"exact_match,{name}"] for name in ("strict-match", "flexible-extract")
)


def lines(path, *objects):
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    return str(path)


# What lm-eval 0.4.13's RegexFilter extracts from the same texts.
@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("She has 3 + 4 = 7.\n#### 7", "7", "7"),
        ("#### 1,200\n\nor 5 dollars", "1,200", "5"),
        ("It costs $3.50.", INVALID, "$3.50."),
        ("#### -4 and #### 9", "-4", "9"),
        ("no number", INVALID, INVALID),
        ("...", INVALID, "..."),
    ],
)
def test_answers_are_extracted_as_by_lm_eval(text, strict, flexible):
    assert (STRICT.extract(text), FLEXIBLE.extract(text)) == (strict, flexible)


@pytest.mark.parametrize(
    ("answer", "right"),
    [("72", True), ("$72", True), ("72.", True), ("7,2", True), ("72.0", False), ("", False)],
)
def test_answers_are_compared_as_by_lm_eval(answer, right):
    assert gsm8k.EQUALITY.holds(answer, "48 / 2 = 24\nand so on\n#### 72") is right


def test_equality_can_ignore_punctuation_and_case():
    assert Equality(ignore_case=True, ignore_punctuation=True).holds("Paris!", "paris")
    assert not Equality().holds("Paris", "paris")
    assert Filter().extract("  x \n") == "x"


def test_gsm8k_asks_as_lm_eval_does():
    task = open_task("gsm8k", TaskSettings(limit=3), shared("data", "tasks"))
    asked = [request.context for request in task.requests]
    assert all(one.count("Question:") == 6 and one.endswith("\nAnswer:") for one in asked)
    # The first example that lm-eval 0.4.13 draws for the first problem, with its seed 1234.
    assert asked[0].startswith("Question: ")
    assert asked[0].rpartition("Question: ")[2].startswith("Janet’s ducks lay 16 eggs")
    assert len({one.split("\n\nQuestion:")[0] for one in asked}) == 3
    assert task.requests[0].until == ("Question:", "</s>", "<|im_end|>")
    # A smaller limit asks the same questions with the same examples.
    again = open_task("gsm8k", TaskSettings(limit=1), shared("data", "tasks"))
    assert again.requests[0] == task.requests[0]


class Scripted:
    """A model whose results are given by functions of the request."""

    name = "scripted"

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, kind):
        def ask(requests, advance):
            advance(len(requests))
            return [self.answers[kind](request) for request in requests]

        return ask


def test_right_answers_to_gsm8k_score_one():
    task = open_task("gsm8k", TaskSettings(limit=8, shots=0), shared("data", "tasks"))
    known = dict(zip([r.context for r in task.requests], task.questions, strict=True))
    model = Scripted(generate_until=lambda request: known[request.context].expected)
    result = evaluate(model, [task]).tasks[0]
    assert result.metrics["exact_match,strict-match"].value == 1.0
    assert result.documents == 8
    wrong = Scripted(generate_until=lambda request: "#### 0")
    assert evaluate(wrong, [task]).tasks[0].metrics["exact_match,flexible-extract"].value == 0.0


@pytest.mark.parametrize("answer", [1, "B", "b", "four"])
def test_multiple_choice_takes_the_likeliest_and_the_likeliest_per_character(tmp_path, answer):
    question = {"question": "2 + 2", "choices": ["a very long answer", "four"], "answer": answer}
    task = open_task(lines(tmp_path / "mc.jsonl", question), TaskSettings())
    logprobs = {" a very long answer": -9.0, " four": -10.0}  # per character the first wins
    model = Scripted(loglikelihood=lambda r: Likelihood(logprobs[r.continuation], 1, False))
    result = evaluate(model, [task]).tasks[0]
    assert result.metrics["acc"].value == 0.0
    assert result.metrics["acc_norm"].value == 0.0
    model = Scripted(
        loglikelihood=lambda r: Likelihood(2 * logprobs[r.continuation] + 12, 1, False)
    )
    assert evaluate(model, [task]).tasks[0].samples[0].answer == "a very long answer"


@pytest.mark.parametrize(("answer", "right"), [("2", 0), (2, 2), ("1", 1), ("C", 2)])
def test_an_answer_in_quotes_that_is_a_choice_is_no_number_of_one(tmp_path, answer, right):
    question = {"question": "1 + 1", "choices": ["2", "4", "8"], "answer": answer}
    file = Path(lines(tmp_path / "mc.jsonl", question))
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())  # as some editors write it
    task = open_task(str(file), TaskSettings())
    model = Scripted(
        loglikelihood=lambda r: Likelihood(-float(r.continuation != f" {2 << right}"), 1, False)
    )
    assert evaluate(model, [task]).tasks[0].metrics["acc"].value == 1.0


def test_a_perplexity_counts_tokens_words_and_bytes(tmp_path):
    name = lines(tmp_path / "text.jsonl", {"text": "to be or"}, {"text": "not to be é"})
    task = open_task(name, TaskSettings())
    model = Scripted(
        rolling=lambda request: [Likelihood(-2.0, 4, False), Likelihood(-4.0, 2, False)]
    )
    metrics = evaluate(model, [task]).tasks[0].metrics
    assert metrics["perplexity"].value == pytest.approx(math.exp(12 / 12))
    assert metrics["word_perplexity"].value == pytest.approx(math.exp(12 / 7))
    assert metrics["byte_perplexity"].value == pytest.approx(math.exp(12 / 20))
    assert metrics["bits_per_byte"].value == pytest.approx(12 / 20 / math.log(2))


def test_examples_of_a_file_never_hold_the_question_itself(tmp_path):
    questions = [{"question": f"q{at}", "answer": f"a{at}"} for at in range(6)]
    task = open_task(lines(tmp_path / "qa.jsonl", *questions), TaskSettings(shots=3, limit=4))
    assert len(task.requests) == 4
    for at, request in enumerate(task.requests):
        *shown, asked = request.context.split("\n\n")
        assert asked == f"Question: q{at}\nAnswer:"
        assert len(shown) == 3
        assert f"q{at}\n" not in "".join(shown)


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        ('{"x": 1}', DataError, "no task"),
        ("not json", DataError, "line 1"),
        ("", DataError, "empty"),
        ('{"question": "q", "choices": ["a", "b"], "answer": "z"}', DataError, "none of 2 choices"),
        ('{"question": "q", "choices": ["a", ""], "answer": 0}', DataError, "empty choice"),
        ('{"question": "q", "choices": "ab", "answer": 0}', DataError, "choices is 'ab'"),
    ],
)
def test_files_that_are_no_task_are_refused(tmp_path, content, error, words):
    path = tmp_path / "x.jsonl"
    path.write_text(content)
    with pytest.raises(error, match=words):
        open_task(str(path), TaskSettings())


@pytest.mark.parametrize("row", [
    {"text": "Write a function", "code": "def f(): ...", "task_id": 1, "test_list": ["assert f()"]},  # MBPP
    {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "...", "test": "...", "entry_point": "f"},
])  # fmt: skip
def test_tasks_of_programs_are_refused(tmp_path, row):
    """The perplexity of their questions is no score of them."""
    name = lines(tmp_path / "code.jsonl", row)
    packed = tmp_path / "code.jsonl.gz"
    packed.write_bytes(gzip.compress(Path(name).read_bytes()))
    for path in (name, str(packed)):
        with pytest.raises(DataError, match="its answers are programs"):
            open_task(path, TaskSettings())


def test_packed_files_are_read_as_plain_ones(tmp_path):
    rows = [{"question": f"q{at}", "answer": f"a{at}"} for at in range(3)]
    plain = Path(lines(tmp_path / "qa.jsonl", *rows))
    text = tmp_path / "text.txt"
    text.write_bytes(b"one\r\ntwo")
    for path in (plain, text):
        packed = path.with_name(path.name + ".gz")
        packed.write_bytes(gzip.compress(path.read_bytes()))
        found, expected = (
            open_task(str(packed), TaskSettings()),
            open_task(str(path), TaskSettings()),
        )
        assert found.requests == expected.requests
        packed.write_bytes(gzip.compress(path.read_bytes())[:-9])
        with pytest.raises(DataError, match="cannot be read"):
            open_task(str(packed), TaskSettings())
    plain.rename(tmp_path / "no.jsonl.gz")
    with pytest.raises(DataError, match="cannot be read"):
        open_task(str(tmp_path / "no.jsonl.gz"), TaskSettings())


def test_unknown_tasks_and_missing_folders_are_refused(tmp_path):
    with pytest.raises(UsageError, match="gsm8"):
        open_task("gsm8", TaskSettings())
    with pytest.raises(DataError, match="gsm8k_test"):
        open_task("gsm8k", TaskSettings(), tmp_path)
    path = lines(tmp_path / "qa.jsonl", {"question": "q", "answer": "a"})
    with pytest.raises(DataError, match="9 examples"):
        open_task(path, TaskSettings(shots=9))


def test_a_line_ends_where_json_lines_end(tmp_path):
    """Texts hold other ends of lines, which are written as they are."""
    texts = ["one\u2028line", "two\x85lines", "three"]
    file = tmp_path / "text.jsonl"
    written = (json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    file.write_text("\r\n".join(written), encoding="utf-8", newline="")
    assert [request.text for request in open_task(str(file), TaskSettings()).requests] == texts
    ids = token_ids(file, Spelled(), 0)
    assert "".join(map(chr, ids)) == "".join(texts)


class Spelled:
    """A tokenizer whose tokens are characters."""

    eos_ids = ()

    def encode_batch(self, texts):
        return [list(map(ord, text)) for text in texts]


def test_a_text_of_which_no_token_can_be_scored_is_refused(tmp_path):
    task = open_task(lines(tmp_path / "short.jsonl", {"text": "a"}), TaskSettings(stride=2))
    with pytest.raises(DataError, match="no token of short"):
        evaluate(Scripted(rolling=lambda request: []), [task])


def test_a_text_without_a_character_has_no_perplexity(tmp_path):
    file = tmp_path / "empty.txt"
    file.write_text("")
    with pytest.raises(DataError, match=r"empty\.txt has no text"):
        open_task(str(file), TaskSettings())
