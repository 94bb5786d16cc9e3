"""Finds a planted fault that a lab notices, for each lab that is named.

    python -m cairn.labs.fault_search roofline young-daly      prints one JSON line for each

Faults are planted in product code: first in what the lab names, then in every other function of the package that one
run of it calls. The lab's own functions come last, for labs of the kernel or of torch alone. A fault counts when a
check that held before is off with it, twice; a lab that raises proves nothing. Used when a function has changed and its
fault has to be found anew; `tests/labs/lab_faults.toml` keeps what was found.
"""

import ast
import contextlib
import json
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from cairn.hw.ceilings import Ceilings, load, machine_file
from cairn.labs.catalogue import find_lab
from cairn.labs.code_location import ROOT
from cairn.labs.lab import Lab
from cairn.labs.planted_fault import Mutant, mutants, planted
from cairn.labs.workbench import Workbench

OF_A_FUNCTION = 6  # mutants that are tried
MOST_TRIES = 60
MOST_S = 40.0  # of searching for one lab
SHOWS = ("_table", "_plot", "_note", "_checks")  # functions that only lay out, or state the claim
CLOCK = re.compile(r"(perf_counter|process_time|monotonic)\(\) - |:_clock_sampler ")
ASIDE = ("cairn/labs/", "cairn/core/events", "cairn/report/")  # nothing that a claim is about


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
        bench = Workbench(ceilings=ceilings, quick=True, folder=Path(folder), sizes=lab.sizes)
        outcome = lab.run(bench)
    return {check.what.en: check.held for check in outcome.checks}, time.perf_counter() - began


def search(lab: Lab, ceilings: Ceilings) -> Found | None:
    before, seconds = once(lab, ceilings, 60.0)
    deadline = time.perf_counter() + MOST_S
    for place, mutant in list(candidates(lab, ceilings))[:MOST_TRIES]:
        if time.perf_counter() > deadline:
            break
        try:
            with planted(place, mutant.number):
                after, took = once(lab, ceilings, 3 * seconds + 5)
                flipped = {what for what, held in after.items() if not held and before.get(what)}
                if flipped:  # noise does not come twice at the same check
                    again, _ = once(lab, ceilings, 3 * seconds + 5)
                    flipped = {what for what in flipped if not again.get(what, True)}
        except Exception:  # noqa: BLE001  a fault that crashes proves nothing about the checks
            continue
        if flipped and (what := _still_held(lab, ceilings, flipped)):
            return Found(place, mutant, what, took)
    return None


def _still_held(lab: Lab, ceilings: Ceilings, flipped: set[str]) -> str | None:
    """The first of these checks that holds without the fault once more."""
    checks, _ = once(lab, ceilings, 60.0)
    return next((what for what, held in checks.items() if held and what in flipped), None)


def candidates(lab: Lab, ceilings: Ceilings) -> Iterator[tuple[str, Mutant]]:
    """Product code first, arithmetic before constants."""
    own = f"cairn/labs/{lab.area}/{lab.name.replace('-', '_')}.py"
    names = [
        one.name
        for one in ast.parse((ROOT / own).read_text()).body
        if isinstance(one, ast.FunctionDef)
    ]
    mine = [f"{own}:{name}" for name in names if name != "run" and not name.startswith(SHOWS)]
    named = [place for one in lab.code for place in functions_of(one)]
    for place in dict.fromkeys([*named, *called(lab, ceilings), *mine]):
        if predicts(place):
            continue
        with contextlib.suppress(ValueError, AttributeError, KeyError, OSError, TypeError):
            changes = [mutant for mutant in mutants(place) if not reads_clock(place, mutant.line)]
            changes.sort(key=lambda mutant: _rank(mutant.change))
            yield from ((place, mutant) for mutant in changes[:OF_A_FUNCTION])


def reads_clock(place: str, line: str) -> bool:
    """Whether this line takes a time: a wrong clock flips any ratio of times, whatever was timed."""
    return CLOCK.search(f"{place} {line}") is not None


def predicts(place: str) -> bool:
    """Whether this function of a lab's file only makes predictions: all calls of it are in `predicted=...`."""
    path, _, name = place.partition(":")
    if not path.startswith("cairn/labs/"):
        return False
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    claims = [
        one.value
        for one in ast.walk(tree)
        if isinstance(one, ast.keyword) and one.arg == "predicted"
    ]
    inside = sum(_calls(claim, name) for claim in claims)
    return inside > 0 and inside == _calls(tree, name)


def _calls(tree: ast.AST, name: str) -> int:
    return sum(isinstance(one, ast.Name) and one.id == name for one in ast.walk(tree))


def functions_of(place: str) -> list[str]:
    """The function that is named, the methods of a class, or all functions of a file."""
    path, _, name = place.partition(":")
    file = ROOT / path
    if file.suffix != ".py" or not file.is_file():
        return []
    body = ast.parse(file.read_text()).body
    tops = [one for one in body if isinstance(one, (ast.FunctionDef, ast.ClassDef))]
    places = []
    for top in tops if not name else [one for one in tops if one.name == name]:
        inner = [one.name for one in top.body if isinstance(one, ast.FunctionDef)]
        inside = isinstance(top, ast.ClassDef)
        places += (
            [f"{path}:{top.name}.{one}" for one in inner] if inside else [f"{path}:{top.name}"]
        )
    return places or [place] if name else places


def called(lab: Lab, ceilings: Ceilings) -> list[str]:
    """Functions of the package that a run of the lab calls in this process, outermost first."""
    seen: dict[CodeType, None] = {}

    def watch(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            seen.setdefault(frame.f_code)

    threading.setprofile(watch)
    sys.setprofile(watch)
    try:
        once(lab, ceilings, 120.0)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    places = [_place(code) for code in seen]
    return [place for place in places if place and not place.startswith(ASIDE)]


def _place(code: CodeType) -> str | None:
    """ "cairn/a/b.py:Class.method", or None for what is not ours or has no name of its own."""
    path = Path(code.co_filename)
    if "<" in code.co_qualname or not path.is_relative_to(ROOT / "cairn"):
        return None
    return f"{path.relative_to(ROOT)}:{code.co_qualname}"


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
