"""A learner predicts first: the guess is kept, scored over time; knobs are checked; a busy machine is said."""

import ast
import importlib
import inspect
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import ceilings_here

from cairn.cli.main import main
from cairn.hw.ceilings import machine_file, save
from cairn.labs import record
from cairn.labs.catalogue import all_labs
from cairn.labs.entry import judge_guess, measured_entry, where_of
from cairn.labs.lab import Check, Outcome, Words, judge, predicted_check, question_of
from cairn.labs.learner import lab_document, look
from cairn.labs.prediction_accuracy import foresight
from cairn.labs.training._spread import tiny


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
        (["roofline", "--set", "n=-1"], "goes from 1 to"),
        (["fragmentation", "--set", "seeds=0.5"], "seeds (drawn workloads) goes from 1 to 100"),
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
            for name, value in (one.split("=") for one in words if "=" in one):
                (knob,) = [knob for knob in all_labs()[words[3]].knobs if knob.name == name]
                assert knob.least <= float(value) <= knob.most, step.command


def test_every_lab_asks_says_why_and_what_to_try_next():
    for lab in all_labs().values():
        assert lab.predict is not None, lab.name
        assert lab.why is not None, lab.name
        assert lab.now_try, lab.name


BY_CHANCE = {("mla", 32)}  # a width in the question, and tokens of the full form


def picked(lab):
    """Sizes that the full form has and the quick one has not, where the call names them."""
    module = importlib.import_module(lab.run.__module__)
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "pick":
            try:
                sizes = [eval(ast.unparse(one), vars(module)) for one in node.args]
            except NameError:
                continue
            full, quick = ({*one} if isinstance(one, tuple) else {one} for one in sizes)
            yield from (one for one in full - quick if isinstance(one, int | float))


def test_a_question_has_the_sizes_of_the_form_that_runs():
    for lab in all_labs().values():
        full, quick = (question_of(lab, form, {}) for form in (False, True))
        assert (full != quick) == bool(lab.sizes), lab.name
        for text in (full.en, full.zh, quick.en, quick.zh):
            assert "{" not in text, text
        fixed = {float(one) for one in re.findall(r"\b\d+(?:\.\d+)?", lab.predict.en)}
        for size in picked(lab):
            named = fixed & {size, size / 2**20} and (lab.name, size) not in BY_CHANCE
            assert not named, f"{lab.name}: {size} is another when quick"
    ledger = all_labs()["request-ledger"]
    assert ", 7 tokens each" in question_of(ledger, True, {"tokens": 7.0}).en
    assert str(tiny().hidden) in all_labs()["tensor-parallel"].predict.en


def test_a_guess_of_a_check_that_is_not_there_has_no_score():
    lab = all_labs()["page-cache"]
    check = Check(what=Words("another", "另一个"), predicted=2.0, measured=2.0, unit="s")
    assert predicted_check(lab, [check]) is None
    outcome = Outcome(checks=[check])
    where = where_of(ceilings_here(), "0", None)
    entry = measured_entry(
        lab, outcome, judge(lab, outcome), at="", seconds=1.0, quick=True, where=where, guess=2.0
    )
    assert (entry.guess.value, entry.guess.measured, entry.guess.factor) == (2.0, None, None)


def test_the_page_asks_for_the_quick_form(home):
    document = lab_document(look(), "request-ledger")
    assert "12 tokens each" in document["about"]["predict"]["en"]
