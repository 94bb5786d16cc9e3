"""Finds a planted fault that a lab notices, for each lab that is named.

    python -m cairn.labs.fault_search roofline young-daly      prints one JSON line for each

Product code that the lab names comes first, then the lab's own functions. A fault counts when a check that held
before is off with it; a lab that raises proves nothing. Used when a function has changed and its fault has to be found
anew; `tests/labs/lab_faults.toml` keeps what was found.
"""

import ast
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from cairn.hw.ceilings import Ceilings, load, machine_file
from cairn.labs.catalogue import find_lab
from cairn.labs.code_place import ROOT
from cairn.labs.lab import Lab
from cairn.labs.planted_fault import Mutant, mutants, planted
from cairn.labs.workbench import Workbench

OF_A_FUNCTION = 6  # mutants that are tried
MOST_TRIES = 24
MOST_S = 40.0  # of searching for one lab
SHOWS = ("_table", "_plot", "_note")  # functions that only lay out


class Found(NamedTuple):
    place: str
    mutant: Mutant
    flips: str  # the check that is off
    seconds: float


def once(lab: Lab, ceilings: Ceilings, limit_s: float) -> tuple[dict[str, bool], float]:
    """Which checks hold in a quick run, and how long it took; TimeoutError beyond the limit."""
    began = time.perf_counter()
    with (
        _limit(limit_s),
        tempfile.TemporaryDirectory() as folder,
        contextlib.redirect_stdout(sys.stderr),
    ):
        outcome = lab.run(Workbench(ceilings=ceilings, quick=True, folder=Path(folder)))
    return {check.what.en: check.held for check in outcome.checks}, time.perf_counter() - began


def search(lab: Lab, ceilings: Ceilings) -> Found | None:
    before, seconds = once(lab, ceilings, 60.0)
    deadline = time.perf_counter() + MOST_S
    for place, mutant in list(candidates(lab))[:MOST_TRIES]:
        if time.perf_counter() > deadline:
            break
        try:
            with planted(place, mutant.number):
                after, took = once(lab, ceilings, 3 * seconds + 5)
        except Exception:  # noqa: BLE001  a fault that crashes proves nothing about the checks
            continue
        flipped = [what for what, held in after.items() if not held and before.get(what)]
        if flipped:
            return Found(place, mutant, flipped[0], took)
    return None


def candidates(lab: Lab) -> Iterator[tuple[str, Mutant]]:
    """Product code first; arithmetic before constants."""
    own = f"cairn/labs/{lab.area}/{lab.name.replace('-', '_')}.py"
    names = [
        one.name
        for one in ast.parse((ROOT / own).read_text()).body
        if isinstance(one, ast.FunctionDef)
    ]
    mine = [f"{own}:{name}" for name in names if name != "run" and not name.startswith(SHOWS)]
    named = [place for place in lab.code if ":" in place]
    for place in dict.fromkeys([*named, *mine]):
        with contextlib.suppress(ValueError, AttributeError, KeyError, OSError, TypeError):
            found = sorted(mutants(place), key=lambda mutant: _rank(mutant.change))
            yield from ((place, mutant) for mutant in found[:OF_A_FUNCTION])


def _rank(change: str) -> int:
    if "returned" in change:
        return 0
    return 1 if any(word in change for word in ("Add", "Sub", "Mult", "Div", "min", "max")) else 2


@contextlib.contextmanager
def _limit(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


if __name__ == "__main__":
    measured = load(machine_file())
    for name in sys.argv[1:]:
        try:
            hit = search(find_lab(name), measured)
        except Exception as error:  # noqa: BLE001  the others are looked at all the same
            print(json.dumps({"lab": name, "error": str(error)[:200]}), flush=True)
            continue
        line = {} if hit is None else {**hit._asdict(), "mutant": hit.mutant._asdict()}
        print(json.dumps({"lab": name, **line}), flush=True)
