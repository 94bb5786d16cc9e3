"""A lab that cannot fail shows nothing: with a small fault in the code it runs, one of its checks has to be off.

Quick ones run here; `CAIRN_ALL_FAULTS=1 pytest tests/labs/test_lab_faults.py` runs all of them, a few minutes.
"""

import os
import tomllib
from pathlib import Path

import pytest
import torch
from lab_samples import ceilings_here

from cairn.hw.probe import probe
from cairn.labs.catalogue import all_labs
from cairn.labs.fault_search import once, predicts, reads_clock
from cairn.labs.needs import unmet
from cairn.labs.planted_fault import find_mutant, mutants, planted

FAULTS = tomllib.loads(Path(__file__).with_name("lab_faults.toml").read_text(encoding="utf-8"))
QUICK_S = 0.8  # of the recorded time, which was taken on a busy machine
ALL = bool(os.environ.get("CAIRN_ALL_FAULTS"))
CHOSEN = sorted(
    name
    for name, fault in FAULTS.items()
    if ALL or (fault["seconds"] <= QUICK_S and not fault.get("by_machine"))
)


def test_every_lab_has_a_fault_that_it_notices():
    assert set(FAULTS) == set(all_labs())


def test_no_fault_is_planted_in_a_claim():
    """To change what a check says proves nothing about the code; a lab that only a GPU runs is not searched here."""
    claims = [name for name, fault in FAULTS.items() if fault["place"].endswith(":_checks")]
    assert claims == ["pinned-copies"]
    predictions = [name for name, fault in FAULTS.items() if predicts(fault["place"])]
    assert predictions == ["openmp"]  # its loops are in C, where nothing is planted


def test_no_fault_is_planted_in_a_clock():
    """A wrong clock flips any ratio of times, whatever was timed."""
    assert not [
        name for name, fault in FAULTS.items() if reads_clock(fault["place"], fault["line"])
    ]
    assert reads_clock("cairn/bench/transfer.py:timed", "return time.perf_counter() - began")


def mutant_of(fault):
    return find_mutant(fault["place"], fault["line"], fault["change"], fault.get("which", 0))


def test_every_recorded_fault_can_still_be_planted():
    """Where this fails, a line has changed: find a fault anew with `python -m cairn.labs.fault_search LAB`."""
    gone = {name: fault["line"] for name, fault in FAULTS.items() if mutant_of(fault) is None}
    assert gone == {}


@pytest.fixture(autouse=True)
def as_before():
    """Labs set threads and gradients; each finds torch as the first one did."""
    torch.manual_seed(0)
    yield
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)


@pytest.mark.parametrize("name", CHOSEN)
def test_a_planted_fault_flips_a_check(name):
    fault = FAULTS[name]
    if reasons := unmet(all_labs()[name].needs, probe()):
        pytest.skip(reasons[0].en)
    with planted(fault["place"], mutant_of(fault).number):
        checks, _ = once(all_labs()[name], ceilings_here(), 60.0)
    assert not checks[fault["flips"]], f"{name} holds although {fault['line']}: {fault['change']}"


def test_a_fault_is_taken_out_again():
    from cairn.cluster import reliability

    before = reliability.young
    place = "cairn/cluster/reliability.py:young"
    (twice,) = [mutant for mutant in mutants(place) if "returned twice" in mutant.change]
    with planted(place, twice.number):
        assert reliability.young(1.0, 2.0) == 4.0
    assert reliability.young is before
    assert reliability.young(1.0, 2.0) == 2.0
