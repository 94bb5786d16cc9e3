"""Exercises grade rightly: the reference passes, the skeleton fails, planted mistakes are caught."""

import json
import os
import re
import subprocess
import sys

import pytest

from cairn.cli.main import main
from cairn.hw.probe import probe
from cairn.labs.code_location import find_place
from cairn.labs.exercises import proof
from cairn.labs.exercises.check import check
from cairn.labs.exercises.exercise import all_exercises, cut_answers, find_exercise
from cairn.labs.needs import unmet
from cairn.labs.roadmap import load

EXERCISES = all_exercises()
CHINESE = re.compile(r"[\u4e00-\u9fff]")
INTERPRETED = [name for name, one in EXERCISES.items() if one.about.interpreted]


@pytest.mark.timeout(300)  # five builds of a C++ operator: 15 s on an idle machine
@pytest.mark.parametrize("name", [name for name in EXERCISES if name not in INTERPRETED])
def test_it_grades_rightly(name):
    if reasons := unmet(EXERCISES[name].about.needs, probe()):
        pytest.skip(reasons[0].en)
    assert list(proof.faults(EXERCISES[name])) == []


def test_kernels_grade_rightly_in_the_interpreter():
    if not INTERPRETED:
        pytest.skip("no exercise is a Triton kernel")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cairn.labs.exercises.proof", *INTERPRETED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*INTERPRETED, "cuda-operator"])
def test_a_reference_passes_on_a_gpu_and_is_timed_there(name, tmp_path):
    """Compiled, in a process of its own: a kernel that reads elsewhere would end the others' device."""
    file = tmp_path / EXERCISES[name].file_name
    file.write_text(EXERCISES[name].answer)
    graded = check(EXERCISES[name], file)
    assert [result for result in graded.graded if not result.passed] == []
    assert [result.figure.unit for result in graded.graded if result.figure] == ["us"]


def texts(about):
    yield from (about.title, about.wanted, *about.hints, *(one.why for one in about.mistakes))


def test_each_is_whole_in_both_languages():
    courses = {course.id for course in load().map.course}
    faults = []
    for name, one in EXERCISES.items():
        about = one.about
        faults += [f"{name}: topic {topic}" for topic in about.topics if topic not in load().topics]
        faults += [f"{name}: {words.en}" for words in texts(about) if CHINESE.search(words.en)]
        faults += [f"{name}: {words.zh}" for words in texts(about) if not CHINESE.search(words.zh)]
        faults += [f"{name}: fewer than 3 mistakes"] * (len(about.mistakes) < 3)
        faults += [f"{name}: fewer than 3 hints"] * (len(about.hints) < 3)
        faults += [f"{name}: {about.minutes} minutes"] * (not 30 <= about.minutes <= 120)
        faults += [f"{name}: {about.course}"] * (about.course not in courses)
        for written in about.solution:
            find_place(written)
    assert faults == []


def test_marks_that_do_not_pair_are_refused():
    assert cut_answers("a\n    # begin answer: pass\n    b\n    # end answer\n") == "a\n    pass\n"
    with pytest.raises(ValueError, match="no end"):
        cut_answers("# begin answer\nb\n")
    with pytest.raises(ValueError, match="do not pair"):
        cut_answers("# end answer\n")


def test_a_learner_starts_fails_takes_a_hint_and_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    assert main(["exercise", "start", "young-daly"]) == 0
    file = tmp_path / "exercises" / "young_daly.py"
    assert "cairn exercise check young-daly" in file.read_text()
    assert main(["exercise", "start", "young-daly"]) == 2  # never overwritten by accident
    capsys.readouterr()
    assert main(["exercise", "check", "young-daly"]) == 1
    assert "not written yet" in capsys.readouterr().out
    for step in (1, 2):
        assert main(["exercise", "hint", "young-daly", "--lang", "zh"]) == 0
        assert f"提示 {step}/" in capsys.readouterr().out
    file.write_text(find_exercise("young-daly").answer)
    assert main(["exercise", "check", "young-daly", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"]
    assert main(["exercise", "list", "--json"]) == 0
    listed = {one["name"]: one["passed"] for one in json.loads(capsys.readouterr().out)}
    assert listed["young-daly"]
    assert not listed["online-softmax"]
    assert main(["exercise", "solution", "young-daly"]) == 0
    assert "cairn/cluster/reliability.py" in capsys.readouterr().out


def test_a_reference_that_is_compiled_leaves_nothing_in_the_package(capsys):
    exercise = find_exercise("lock-free-ring")
    if unmet(exercise.about.needs, probe()):
        pytest.skip("needs a compiler")
    before = set(exercise.reference.parent.iterdir())
    assert main(["exercise", "check", exercise.name, "--reference"]) == 0, capsys.readouterr().out
    assert set(exercise.reference.parent.iterdir()) == before


def test_an_answer_that_never_ends_is_stopped(tmp_path):
    file = tmp_path / "young_daly.py"
    file.write_text("while True: pass\n")
    graded = check(find_exercise("young-daly"), file, limit_s=0.5)
    assert not graded.passed
    assert "did not end" in graded.results[0].said.en


def test_a_file_of_another_kind_is_no_answer(tmp_path, capsys):
    (tmp_path / "answer.txt").write_text("x = 1\n")
    command = ["exercise", "check", "young-daly", "--file", str(tmp_path / "answer.txt")]
    assert main(command) == 2
    assert "another ending than .py" in capsys.readouterr().err


def test_a_wrong_name_suggests_the_nearest(capsys):
    assert main(["exercise", "hint", "online-sofmax"]) == 2
    assert "online-softmax" in capsys.readouterr().err
