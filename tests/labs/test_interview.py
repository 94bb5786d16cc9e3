"""Typed answers are graded by rubric, plans have outputs, stories come from the record."""

import io
import json
import re
import shlex
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import ceilings_here, lab, outcome

from cairn.cli.main import VERBS, main
from cairn.labs.catalogue import all_labs
from cairn.labs.code_location import find_place
from cairn.labs.entry import measured_entry, where_of
from cairn.labs.exercises.exercise import all_exercises
from cairn.labs.interview import INTERVALS_DAYS, choose, due, rounds
from cairn.labs.lab import judge
from cairn.labs.learner import look
from cairn.labs.plans import load as load_plans
from cairn.labs.progress import Answer
from cairn.labs.roadmap import load
from cairn.labs.rubric import Point, grade_answer, numbers_in, worded
from cairn.labs.story import drafts

QUESTIONS = [question for one in rounds().values() for question in one.question]
CHINESE = re.compile(r"[\u4e00-\u9fff]")


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.topic)
def test_the_model_answer_is_full_marks_and_an_evasion_is_none(question):
    for language in ("en", "zh"):
        graded = grade_answer(question.answer.of(language), question.points)
        assert graded.missing == [], (language, graded)
    assert not grade_answer("I would look it up and ask a colleague.", question.points).right
    assert question.topic in load().topics


def test_numbers_are_read_with_their_units():
    assert 147456 in numbers_in("2 x 36 = 147,456 bytes")
    assert 144 * 1024 in numbers_in("144 KiB")
    assert 0.875 in numbers_in("87.5% is wasted")
    assert 1.5e9 in numbers_in("1.5G")


@given(st.floats(1, 1e6), st.floats(-0.2, 0.2))
def test_a_number_counts_within_its_tolerance(value, off):
    point = Point(number=round(value, 3), within=0.05)
    given_value = round(value * (1 + off), 3)
    held = grade_answer(f"about {given_value}", [point]).found != []
    if abs(off) < 0.04:
        assert held
    if abs(off) > 0.06:
        assert not held


def test_a_word_counts_in_any_number_and_case():
    point = Point(need=["queue"])
    assert grade_answer("Queues build up", [point]).right
    assert not grade_answer("nothing waits", [point]).right


def test_a_point_is_shown_in_one_language():
    assert worded("clock / throttle / 降频", "en") == "clock / throttle"
    assert worded("clock / throttle / 降频", "zh") == "降频"
    assert worded("147456", "zh") == "147456"


def test_answers_come_again_at_growing_intervals():
    start = datetime(2026, 1, 1, tzinfo=UTC)

    def at(days, right=True):
        return Answer("roofline", (start + timedelta(days=days)).isoformat(), right)

    assert due([at(0, False)], start) == ["roofline"]
    for streak in range(1, len(INTERVALS_DAYS)):
        given_answers = [at(0)] * streak
        wait = INTERVALS_DAYS[streak - 1]
        assert due(given_answers, start + timedelta(days=wait - 0.1)) == []
        assert due(given_answers, start + timedelta(days=wait)) == ["roofline"]


def test_what_is_due_is_asked_first():
    asked = choose(rounds().values(), 3, 5, ["kv-cache"])
    assert asked[0][1].topic == "kv-cache"
    assert asked == choose(rounds().values(), 3, 5, ["kv-cache"])


def test_an_interview_over_a_pipe(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    answer = next(q for q in QUESTIONS if q.topic == "kv-cache").answer.en
    monkeypatch.setattr("sys.stdin", io.StringIO(answer + "\n"))
    words = ["learn", "interview", "--round", "inference", "--count", "1"]
    seed = next(
        str(n) for n in range(50) if choose([rounds()["inference"]], 1, n)[0][1].topic == "kv-cache"
    )
    assert main([*words, "--seed", seed]) == 0
    assert "100%" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["due"] == []  # answered today
    assert main(["learn", "interview", "--round", "inferenc"]) == 2
    assert "inference" in capsys.readouterr().err


def test_a_placement_test_finishes_what_is_known(tmp_path, monkeypatch, capsys):
    """Both answers right: done without its labs, and what needs it is unlocked; one wrong: it is not."""
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    lesson = [
        q.answer.zh.replace("\n", " ") for q in rounds()["topics"].question if q.topic == "roofline"
    ]
    words = ["learn", "placement", "--topic", "roofline", "--lang", "zh"]
    for given_answers, state in (([lesson[0], "?"], "begun"), (lesson, "done")):
        monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(given_answers) + "\n"))
        assert main(words) == 0
        assert ("roofline" in capsys.readouterr().out.splitlines()[-1]) == (state == "done")
        found = look().standings
        assert (found["roofline"].state == "done") == (state == "done")
    assert all("roofline" not in one.missing for one in found.values())
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["questions"] == []  # nothing is left to ask


def test_every_step_of_every_plan_can_be_followed():
    faults = []
    for plan in load_plans().plan:
        for stage in plan.stage:
            where = f"{plan.id} {stage.when.en}"
            texts = (stage.when, stage.theme, stage.output, stage.check)
            faults += [
                f"{where}: {t.zh}"
                for t in texts
                if not CHINESE.search(t.zh) or CHINESE.search(t.en)
            ]
            faults += [f"{where}: {c}" for c in stage.commands if not _exists(c)]
    for capstone in load_plans().capstone:
        assert len(capstone.rubric) >= 4
        for written in capstone.reference:
            find_place(written)
    assert faults == []
    assert [(plan.id, len(plan.stage)) for plan in load_plans().plan] == [
        ("week", 7),
        ("12-weeks", 12),
        ("year", 12),
    ]


def _exists(command):
    verb, *rest = shlex.split(command)[1:]
    names = [word for word in rest[1:] if not word.startswith("-")]
    if verb == "lab" and rest[0] == "run" and "--area" not in rest:
        return names[0] in all_labs()
    if verb == "exercise":
        return names[0] in all_exercises()
    if verb == "learn" and rest:
        return rest[0] in (*load().topics, "quiz", "interview", "story")
    return verb in VERBS


def test_a_plan_and_a_story_as_markdown(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    assert main(["learn", "plan", "week", "--markdown", str(tmp_path / "week.md")]) == 0
    text = (tmp_path / "week.md").read_text()
    assert text.count("\n## Day ") == 7
    assert "- [ ] `cairn exercise check online-softmax`" in text
    assert main(["learn", "plan", "12-weeks", "--lang", "zh"]) == 0
    assert "第 12 周" in capsys.readouterr().out
    assert main(["learn", "story"]) == 0
    story = capsys.readouterr().out
    assert "three minutes" in story
    assert main(["learn", "story", "--json"]) == 0
    assert "three minutes" in json.loads(capsys.readouterr().out)["markdown"]
    assert main(["learn", "plan", "decade"]) == 2
    assert main(["learn", "roofline", "week"]) == 2


def test_a_run_on_a_busy_machine_is_no_story():
    sample = lab(run=outcome)
    where = where_of(ceilings_here(), "0.1", None)
    found = outcome(None)
    for busy, told in ((False, True), (True, False)):
        entry = measured_entry(
            sample,
            found,
            judge(sample, found),
            at="",
            seconds=1.0,
            quick=True,
            where=where,
            busy=busy,
        )
        text = drafts({sample.name: entry}, {sample.name: sample}, [], "en")
        assert (f"## {sample.title.en}" in text) == told


def test_every_exercise_that_a_plan_starts_is_checked_after_it():
    for plan in load_plans().plan:
        for stage in plan.stage:
            for at, command in enumerate(stage.commands):
                if command.startswith("cairn exercise start "):
                    assert command.replace(" start ", " check ") in stage.commands[at:]
