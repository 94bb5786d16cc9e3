"""One lab from its needs to its entry: held, off, failed, skipped, too slow; and nothing is left behind."""

import dataclasses
import itertools
import math
import time

import msgspec
import pytest
from lab_samples import both, ceilings_here, lab, measured, outcome

from cairn.hw.ceilings import load, machine_file, save
from cairn.hw.machine import Cpu, Gpu, Machine, Versions
from cairn.hw.probe import probe
from cairn.labs.busy import Reading, Watch, others_share
from cairn.labs.entry import Entry, where_of
from cairn.labs.lab import Check, Outcome
from cairn.labs.needs import unmet
from cairn.labs.pace import Pace, has_moved, pace
from cairn.labs.runner import Session, run_lab


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path))
    known = ceilings_here()
    save(known, machine_file())
    return Session(
        machine=probe(),
        ceilings=known,
        where=where_of(known, "0.1", None),
        quick=True,
        limit_s=30.0,
    )


def held(bench):
    return Outcome(checks=[Check(what=both("x"), predicted=2.0, measured=2.0, unit="")])


def test_a_lab_that_holds(session):
    seen = []

    def run(bench):
        bench.step("now")
        (bench.folder / "file").write_text("x")
        seen.append(bench.folder)
        assert bench.quick
        return held(bench)

    steps = []
    entry = run_lab(lab(run=run), session, steps.append)
    assert (entry.status, entry.verdict.en) == ("held", "exactly as predicted")
    assert entry.attempts == 1
    assert steps == ["now"]
    assert not seen[0].exists()


def test_off_while_others_hold_the_cores_says_busy(session, monkeypatch):
    """The load of the whole run counts, also one that has ended; what the lab itself works does not."""
    begin = Reading(working=10.0, total=100.0, own=4.0)
    assert others_share(begin, Reading(working=17.0, total=120.0, own=5.0)) == pytest.approx(0.3)
    assert others_share(begin, Reading(working=30.0, total=120.0, own=24.0)) == 0.0
    assert others_share(begin, begin) == 0.0

    idle, held_by_others = (
        Reading(working=30.0, total=120.0, own=24.0),
        Reading(working=17.0, total=120.0, own=5.0),
    )
    loaded = watched(session, monkeypatch, begin, held_by_others, [STEADY])
    entry = run_lab(lab(run=_measures(3.0, 4.0)), loaded)
    assert entry.status == "busy"
    assert "measure again when it is idle" in entry.verdict.en
    again = run_lab(lab(run=_measures(3.0, 2.0)), loaded)  # measured once more
    assert (again.status, again.attempts) == ("held", 2)
    assert again.verdict.en == "exactly as predicted (at the second attempt)"
    assert run_lab(lab(run=_measures(3.0, 3.0)), loaded).status == "off"  # load repeats no number
    quiet = watched(session, monkeypatch, begin, idle, [STEADY])
    assert run_lab(lab(run=_measures(3.0, 4.0)), quiet).status == "off"
    assert run_lab(lab(run=_measures(3.0, 2.0)), quiet).status == "held"
    assert run_lab(lab(run=held), loaded).status == "held"


STEADY = Pace(compute_s=0.010, memory_s=0.005)


def watched(session, monkeypatch, before, after, paces):
    """A session whose machine shows these readings around each lab, and these paces one after the other."""
    readings, left = itertools.cycle([before, after]), itertools.cycle(paces)
    monkeypatch.setattr("cairn.labs.busy.reading", lambda: next(readings))
    monkeypatch.setattr("cairn.labs.busy.pace", lambda: next(left))
    return dataclasses.replace(session, watch=Watch())


@pytest.mark.parametrize("slow", [Pace(0.014, 0.005), Pace(0.010, 0.008)])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_off_while_the_pace_moved_says_busy(session, monkeypatch, slow, when):
    """A neighbour that /proc/stat does not show, before the first run, between the two, or after them."""
    paces = [STEADY] * 3
    paces[when] = slow
    disturbed = watched(session, monkeypatch, None, None, paces)
    assert run_lab(lab(run=_measures(3.0, 4.0)), disturbed).status == "busy"
    steady = watched(session, monkeypatch, None, None, [STEADY])
    assert run_lab(lab(run=_measures(3.0, 4.0)), steady).status == "off"


def test_a_machine_that_is_slow_all_along_is_seen_beside_an_earlier_lab(session, monkeypatch):
    slow = Pace(0.020, 0.005)
    later = watched(session, monkeypatch, None, None, [STEADY, slow, slow, slow])
    assert run_lab(lab(run=held), later).status == "held"
    assert run_lab(lab(run=_measures(3.0, 4.0)), later).status == "busy"
    assert not has_moved([STEADY, Pace(0.011, 0.0055)])
    assert min(pace()) > 0


def _measures(*values):
    """A lab whose runs measure these, one after the other, where 2 is predicted."""
    left = iter(values)
    what = both("x")
    return lambda bench: Outcome(
        checks=[Check(what=what, predicted=2.0, measured=next(left), unit="s")]
    )


def test_a_lab_that_is_off_is_a_result_and_its_entry_survives_json(session):
    entry = run_lab(lab(run=outcome), session)
    assert entry.status == "off"
    assert "one cause" in entry.verdict.en
    assert entry.checks[1].measured is None  # not a number
    assert msgspec.json.decode(msgspec.json.encode(entry), type=Entry) == entry
    assert all(math.isfinite(x) for line in entry.plots[0].lines for p in line.points for x in p)


def test_a_lab_that_raises_leaves_its_whole_traceback_and_no_ceilings(session):
    def run(bench):
        raise RuntimeError("broken here")

    entry = run_lab(lab(run=run), session)
    assert entry.status == "failed"
    assert entry.failure.count("Traceback (most recent call last)") == 1
    assert entry.failure.endswith("RuntimeError: broken here\n")
    assert "in run" in entry.failure


def test_a_lab_without_a_check_or_with_nonsense_is_a_failure(session):
    assert "measured nothing" in run_lab(lab(run=lambda b: Outcome(checks=[])), session).failure
    wrong = dataclasses.replace(held(None), calibrates={"copi": measured(1.0)})
    assert "no ceiling 'copi'" in run_lab(lab(run=lambda b: wrong), session).failure


def test_a_lab_that_hangs_is_ended(session):
    quick = dataclasses.replace(session, limit_s=0.2)
    entry = run_lab(lab(run=lambda bench: time.sleep(60)), quick)
    assert "LabTimeout: lab sample did not end within 0.2 s" in entry.failure


def test_what_it_measured_goes_into_machine_json(session):
    found = dataclasses.replace(
        held(None), calibrates={"copy": measured(9e10), "launch": measured(1.0, "s")}
    )
    entry = run_lab(lab(run=lambda bench: found), session)
    assert entry.calibrated == ["copy"]
    assert load(machine_file()).copy.value == 9e10


def test_threads_and_gradients_are_as_before(session):
    import torch

    def run(bench):
        torch.set_num_threads(before + 1)
        torch.set_grad_enabled(False)
        return held(bench)

    before = torch.get_num_threads()
    assert run_lab(lab(run=run), session).status == "held"
    assert torch.get_num_threads() == before
    assert torch.is_grad_enabled()


def test_what_a_library_prints_does_not_reach_standard_output(session, capsys):
    def run(bench):
        print("chatter")
        return held(bench)

    assert run_lab(lab(run=run), session).status == "held"
    assert capsys.readouterr() == ("", "chatter\n")


def test_unmet_needs_skip_it_and_say_why(session):
    bare = Machine(cpu=Cpu(usable_threads=1))
    entry = run_lab(
        lab(run=None, needs=("gpu", "2 cores")), dataclasses.replace(session, machine=bare)
    )
    assert entry.status == "skipped"
    assert entry.verdict.en == (
        "needs gpu: this machine has no GPU; needs 2 cores: this process may use 1"
    )


def test_a_gpu_that_torch_cannot_use_is_said():
    machine = Machine(
        gpus=[Gpu(index=0, name="H200", source="nvml")], versions=Versions(torch="2.13.0+cpu")
    )
    assert unmet(("gpu",), machine) == []  # the list does not ask torch
    assert unmet(("gpu",), machine, "cuda:0") == []
    (why,) = unmet(("gpu",), machine, "cpu")
    assert why.en == "needs gpu: torch 2.13.0+cpu cannot use H200"


def test_a_share_of_a_core_is_less_than_two():
    machine = Machine(cpu=Cpu(usable_threads=64, quota=1.5))
    assert unmet(("2 cores",), machine)[0].en == "needs 2 cores: this process may use 1.5"
    assert unmet(("2 cores",), Machine(cpu=Cpu(usable_threads=2))) == []


def test_one_of_two_is_enough(monkeypatch):
    """A lab with a form for a GPU and one for a CPU that has to be compiled."""
    need = ("gpu or compiler",)
    gpu = Machine(gpus=[Gpu(index=0, name="H200", source="nvml")])
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("cairn.labs.needs.shutil.which", lambda name: None)
    assert unmet(need, gpu, "cuda:0") == []
    assert unmet(need, gpu) == []
    assert "no C compiler" in unmet(need, Machine(), "cpu")[0].en
    monkeypatch.setattr("cairn.labs.needs.shutil.which", lambda name: f"/usr/bin/{name}")
    assert unmet(need, Machine(), "cpu") == []
