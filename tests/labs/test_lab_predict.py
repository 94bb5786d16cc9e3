"""A learner predicts first: the guess is kept, scored over time; knobs are checked; a busy machine is said."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import ceilings_here

from cairn.cli.main import main
from cairn.hw.ceilings import machine_file, save
from cairn.labs import record
from cairn.labs.catalogue import all_labs
from cairn.labs.entry import judge_guess
from cairn.labs.foresight import foresight


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_DATA", str(tmp_path))
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    save(ceilings_here(), machine_file())
    return tmp_path


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_a_guess_is_a_factor_of_at_least_one_and_symmetric(guess, measured):
    factor = judge_guess(guess, measured).factor
    assert factor >= 1
    assert factor == judge_guess(measured, guess).factor


def test_a_guess_of_the_other_sign_has_no_factor():
    assert judge_guess(-1.0, 2.0).factor is None
    assert judge_guess(1.0, float("nan")).factor is None
    assert judge_guess(0.0, 0.0).factor == 1.0


def test_a_prediction_is_kept_and_scored(home, capsys):
    assert main(["lab", "run", "young-daly", "--predict", "60", "--quick", "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["guess"]["value"] == 60
    assert run["guess"]["measured"] == run["checks"][0]["measured"]
    assert all(check["simulated"] for check in run["checks"])
    seen = foresight(record.read().entries)
    assert seen.count == 1
    assert seen.median == run["guess"]["factor"]
    assert main(["lab", "report"]) == 0
    assert "your predictions: 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["young-daly", "--set", "nothing=3"], "no knob 'nothing'"),
        (["roofline", "--set", "n=many"], "is no number"),
        (["roofline", "--set", "n=-1"], "above 0"),
        (["roofline", "young-daly", "--predict", "3"], "for one lab"),
    ],
)
def test_mistakes_are_said_before_anything_runs(home, capsys, words, said):
    assert main(["lab", "run", *words]) == 2
    assert said in capsys.readouterr().err


def test_every_knob_and_next_step_is_real():
    for lab in all_labs().values():
        for step in lab.now_try:
            words = step.command.split()
            assert words[:3] == ["cairn", "lab", "run"], step.command
            assert words[3] in all_labs(), step.command
        assert not lab.now_try or lab.why is not None, f"{lab.name} says what to try and not why"
