"""Corpora by rule: pure functions of a number, with answers that are right."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.train.data.arithmetic import Problem, is_right, problem
from cairn.train.data.batch import IGNORED
from cairn.train.data.chats import chat
from cairn.train.data.procedural import NAMES, Procedural, as_text
from cairn.train.data.stories import story
from cairn.train.data.tokenizer_trainer import byte_tokenizer

NUMBERS = st.integers(0, 2**40)
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


@given(NUMBERS, NUMBERS)
def test_the_working_of_every_problem_is_true(seed, number):
    made = problem(seed, number)
    steps = STEP.findall(made.working)
    assert steps
    for left, sign, right, result in steps:
        a, b = int(left), int(right)
        assert {"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign] == int(result)
    assert int(steps[-1][3]) == made.answer >= 0
    assert is_right(made, made.solution)
    assert not is_right(made, f"The answer is {made.answer + 1}.")


def test_a_question_in_one_line_has_the_answer_that_python_gives():
    plain = re.compile(r"(\d+) ([-+*/]) (\d+)")
    asked = 0
    for number in range(500):
        made = problem(7, number)
        found = plain.search(made.question)
        if found:
            asked += 1
            assert eval("".join(found.groups())) == made.answer
    assert asked > 200


def test_the_judge_reads_the_last_number():
    made = Problem("q", "w", 1234)
    assert is_right(made, "First 5, then 1,234.")
    assert is_right(made, "1234.0")
    assert not is_right(made, "It is twelve.")
    assert is_right(Problem("q", "w", -3), "that makes -3")


@given(NUMBERS, NUMBERS)
def test_stories_and_chats_are_pure_and_well_formed(seed, number):
    told = story(seed, number)
    assert told == story(seed, number)
    assert told.endswith((".", '."'))
    assert "  " not in told
    assert told.count('"') % 2 == 0
    said = chat(seed, number)
    assert said == chat(seed, number)
    roles = [message["role"] for message in said if message["role"] != "system"]
    assert roles == ["user", "assistant"] * (len(roles) // 2)
    assert all(message["content"].strip() for message in said)


def test_there_is_no_end_of_different_documents():
    for name in NAMES:
        made = [as_text(name, 0, number) for number in range(2000)]
        assert len(set(made)) > (1900 if name == "stories" else 1000)
    with pytest.raises(ConfigError, match="no procedural corpus 'storys'") as refused:
        as_text("storys", 0, 0)
    assert "stories" in (refused.value.hint or "")


@pytest.mark.parametrize("name", NAMES)
def test_samples_are_full_pure_and_predict_the_next_token(name):
    tokenizer = byte_tokenizer()
    source = Procedural(name, tokenizer, 700, seed=3)
    again = Procedural(name, tokenizer, 700, seed=3)
    for number in (0, 5, 10**12):
        batch = source.batch(number)
        assert batch.tokens_T.equal(again.batch(number).tokens_T)
        assert len(batch.tokens_T) == 700
        learnt = (batch.targets_T != IGNORED).nonzero().flatten()
        inner = learnt[learnt < 699]
        assert len(inner) > 100
        assert batch.targets_T[inner].equal(batch.tokens_T[inner + 1])
        ends = batch.cu_seqlens[1:-1].long() - 1
        assert (batch.targets_T[ends] == IGNORED).all()
        assert (batch.positions_T[ends + 1] == 0).all()
    assert not source.batch(0).tokens_T.equal(source.batch(1).tokens_T)
    assert source.samples_per_epoch is None
    assert source.fingerprint != Procedural(name, tokenizer, 700, seed=4).fingerprint


def test_of_made_up_chats_only_the_answers_are_learnt():
    tokenizer = byte_tokenizer()
    batch = Procedural("chats", tokenizer, 2000, seed=1).batch(0)
    said = "".join(
        tokenizer.decode([target], skip_special=False)
        for target in batch.targets_T.tolist()
        if target != IGNORED and target < 4
    )
    assert set(said.replace("<|im_end|>", "")) == set()  # no <|im_start|>, no padding
    assert "user" not in tokenizer.decode(batch.targets_T[batch.targets_T != IGNORED].tolist())
    assert torch.isin(batch.targets_T, torch.tensor([tokenizer.id("<|im_end|>")])).any()
