"""Progress bar and ETA of a run of labs, on stderr if it is a terminal.

Each lab says about how long it takes; the bar weighs them by that, and the time that is left follows the pace so far.
Drawn between the steps of a lab only: a thread that redraws would run beside what is measured.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from cairn.labs.lab import Lab
from cairn.report.progress import Bar

QUICK = 0.3  # of a lab's time, about


class LabProgress:
    def __init__(self, labs: Sequence[Lab], quick: bool) -> None:
        self._weights = {lab.name: lab.seconds * (QUICK if quick else 1.0) for lab in labs}
        self._count = 0
        self._done = 0.0  # of the weights
        self._spent = 0.0  # seconds

    @contextmanager
    def of(self, lab: Lab) -> Generator[Callable[[str], None]]:
        """While one lab runs; gives the function that shows its steps."""
        began = time.monotonic()
        weight, total = self._weights[lab.name], sum(self._weights.values())
        place = f"{self._count + 1}/{len(self._weights)} {lab.name}"
        with Bar(place, total) as bar:

            def step(label: str) -> None:
                inside = min(time.monotonic() - began, 0.95 * weight)
                left = time_left(self._done, self._spent, inside, total)
                bar.update(self._done + inside, label[:48], left_s=left, now=True)

            step("starting")
            try:
                yield step
            finally:
                self._count += 1
                self._done += weight
                self._spent += time.monotonic() - began


def time_left(done: float, spent: float, inside: float, total: float) -> float:
    """Seconds: what is left of the labs' own estimates, at the pace of those that have ended."""
    pace = spent / done if done > 0 else 1.0
    return max(total - done - inside, 0.0) * pace
