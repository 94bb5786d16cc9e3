"""Runs one lab in a process of its own and says on standard output what it does, line by line: the page's "run it".

    python -m cairn.labs.live roofline [GUESS]
    {"step": "matrix product 256 x 256"}
    {"status": "held", "verdict": {"en": ..., "zh": ...}}

The quick form; the run goes to the lab record like any other, with the learner's guess where one was made.
"""

import json
import sys

from cairn import __version__
from cairn.hw.calibrate import calibrate
from cairn.hw.ceilings import Ceilings
from cairn.hw.machine import Machine
from cairn.hw.probe import probe
from cairn.labs import calibration, record
from cairn.labs.busy import Watch
from cairn.labs.catalogue import find_lab
from cairn.labs.entry import where_of
from cairn.labs.runner import Session, run_lab


def main(name: str, guess: float | None = None) -> None:
    out = sys.stdout  # while a lab runs, standard output is standard error

    def say(document: dict[str, object]) -> None:
        print(json.dumps(document, ensure_ascii=False), file=out, flush=True)

    def measure(machine: Machine) -> Ceilings:
        return calibrate(machine, quick=True)

    machine = probe()
    ceilings = calibration.ready(machine, measure, lambda line: say({"step": line}))
    session = Session(
        machine=machine,
        ceilings=ceilings,
        where=where_of(ceilings, __version__, None),
        quick=True,
        watch=Watch(),
    )
    entry = run_lab(find_lab(name), session, lambda label: say({"step": label}), guess)
    if entry.status != "skipped":
        record.append(entry)
    say({"status": entry.status, "verdict": {"en": entry.verdict.en, "zh": entry.verdict.zh}})


if __name__ == "__main__":
    main(sys.argv[1], *(float(word) for word in sys.argv[2:]))
