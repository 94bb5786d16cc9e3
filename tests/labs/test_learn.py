"""Who has learnt what, the quiz, and `cairn learn` as a person uses it."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import ceilings_here

from cairn.cli.main import main
from cairn.hw.ceilings import machine_file, save
from cairn.labs import learner as learners
from cairn.labs.progress import Answers, next_topics, standing
from cairn.labs.quiz import choose, pool
from cairn.labs.roadmap import load

TOPICS = load().topics
LABS = sorted({lab for topic in TOPICS.values() for lab in topic.labs})


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A record and a machine.json of its own; its ceilings are made up, and nothing is calibrated."""
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    save(ceilings_here(), machine_file())
    return tmp_path


@given(
    run=st.sets(st.sampled_from(LABS)),
    answered=st.sets(st.sampled_from(sorted(TOPICS))),
    impossible=st.sets(st.sampled_from(LABS)),
)
def test_done_means_labs_run_and_question_answered(run, answered, impossible):
    found = standing(
        load(), labs_run=run, labs_impossible=dict.fromkeys(impossible, "no"), answered=answered
    )
    for name, topic in TOPICS.items():
        left = set(topic.labs) - run - impossible
        assert (found[name].state == "done") == (name in answered and not left)
        assert found[name].labs_left == [lab for lab in topic.labs if lab in left]
        blocked = any(found[needed].state != "done" for needed in topic.requires)
        assert bool(found[name].missing) == blocked
    proposed = next_topics(found, len(TOPICS))
    assert all(one.state in ("begun", "ready") for one in proposed)
    assert proposed or all(one.state in ("done", "later") for one in found.values())


def test_whoever_follows_the_proposals_gets_everywhere():
    run, answered = set(), set()
    for _ in range(len(TOPICS)):
        found = standing(load(), labs_run=run, labs_impossible={}, answered=answered)
        proposed = next_topics(found, 1)
        if not proposed:
            break
        run |= set(proposed[0].labs_left)
        answered.add(proposed[0].topic)
    assert answered == set(TOPICS)


def test_answers_are_kept_and_the_latest_counts(home):
    kept = Answers(home / "answers.jsonl")
    assert kept.right() == set()
    kept.add("kv-cache", False)
    kept.add("roofline", True)
    assert kept.right() == {"roofline"}
    kept.add("kv-cache", True)
    kept.add("roofline", False)
    assert kept.right() == {"kv-cache"}
    with open(home / "answers.jsonl", "ab") as file:
        file.write(b'{"topic": "half a li')  # the machine went down
    assert kept.right() == {"kv-cache"}
    kept.add("roofline", True)  # begins behind the line that was cut short
    assert kept.right() == {"kv-cache", "roofline"}
    assert len(kept.read().trouble) == 1


def test_a_damaged_line_of_answers_is_left_out_and_said(home, capsys):
    (home / "answers.jsonl").write_text("nonsense\n")
    Answers(home / "answers.jsonl").add("kv-cache", True)
    assert main(["learn", "kv-cache", "--json"]) == 0
    told = capsys.readouterr()
    assert "answers.jsonl line 1 is left out" in told.err
    assert json.loads(told.out)["standing"]["answered"]


def test_the_quiz_prefers_what_was_not_answered(home):
    learner = learners.look()
    questions = pool(learner, list(TOPICS.values()))
    answered = set(sorted(TOPICS)[:-3])
    chosen = choose(questions, answered, 6, seed=1)
    fresh = {one.topic for one in chosen if one.lab is None} - answered
    assert fresh == set(TOPICS) - answered
    assert len(chosen) == 6
    assert chosen == choose(questions, answered, 6, seed=1)
    assert len({one.ask.en for one in questions}) == len(questions)  # nobody is asked twice


def test_the_map_as_json(home, capsys):
    assert main(["learn", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [course["id"] for course in document["courses"]] == [f"SYS-60{n}" for n in range(1, 6)]
    shown = [t["id"] for c in document["courses"] for s in c["sections"] for t in s["topics"]]
    assert sorted(shown) == sorted(TOPICS)
    assert document["topics"] == len(TOPICS)
    assert document["done"] == 0
    assert len(document["plans"]["week"]) == 7
    assert all(name in TOPICS for name in document["next"])


def test_a_lab_that_ran_and_an_answer_finish_a_topic(home, capsys):
    assert main(["lab", "run", "positions", "attention-from-scratch", "--quick"]) == 0
    learners.answers().add("transformer", True)
    capsys.readouterr()
    assert main(["learn", "transformer", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["standing"]["state"] == "done"
    assert {run["lab"] for run in document["runs"]} == {"positions", "attention-from-scratch"}
    assert main(["learn", "quiz", "--topic", "transformer", "--json", "--count", "9"]) == 0
    asked = json.loads(capsys.readouterr().out)["questions"]
    assert len(asked) == 8  # two of the topic's lesson, three of each lab
    own = next(one for one in asked if one["lab"] is None)  # they come in a new order each time
    assert any("RoPE" in line["en"] for line in own["evidence"])


def test_a_topic_in_chinese(home, capsys):
    assert main(["learn", "kv-cache", "--lang", "zh"]) == 0
    shown = capsys.readouterr().out
    assert "如何观察与调试" in shown
    assert "参考答案" in shown  # how to see it
    assert TOPICS["kv-cache"].zh.title in shown
    assert "cairn/serve/" in shown


@pytest.mark.parametrize(
    "words", [["next"], ["week"], ["year", "--lang", "zh"], ["--course", "SYS-604"]]
)
def test_other_views(home, capsys, words):
    assert main(["learn", *words]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kv-cach"], "kv-cache"),
        (["quiz", "--course", "SYS-6"], "SYS-60"),
        (["next", "--count", "0"], "at least 1"),
        (["--html", "/nowhere/at/all.html"], "no folder"),
        (["quiz"], "standard input is no terminal"),
    ],
)
def test_mistakes_are_answered(home, capsys, monkeypatch, words, said):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(["learn", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_interview(home, capsys, monkeypatch):
    """A person at a terminal: a typed answer is graded by its rubric, that to a lab's question by the person."""
    asked = pool(learners.look(), [TOPICS["evaluation"]])
    chosen = choose(asked, (), 3, 1)
    replies = iter([*(part for one in chosen for part in _replies(one)), "q"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(replies))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["learn", "quiz", "--topic", "evaluation", "--count", "3", "--seed", "1"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3" in said
    assert "100%" in said


def _replies(question):
    return [question.answer.en] if question.points else ["aloud", "y"]
