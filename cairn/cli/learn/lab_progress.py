"""How far is a run of labs, and how long will it take? A bar on stderr where a person watches, nothing in a log.

Each lab says about how long it takes; the bar weighs them by that, and the time that is left follows the pace so far.
Drawn between the steps of a lab only: a thread that redraws would run beside what is measured.
"""

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from cairn.labs.lab import Lab

QUICK = 0.3  # of a lab's time, about


class LabProgress:
    def __init__(self, labs: Sequence[Lab], quick: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True)
        self._weights = {lab.name: lab.seconds * (QUICK if quick else 1.0) for lab in labs}
        self._count = 0
        self._done = 0.0  # of the weights
        self._spent = 0.0  # seconds

    @contextmanager
    def of(self, lab: Lab) -> Generator[Callable[[str], None]]:
        """While one lab runs; gives the function that shows its steps."""
        began = time.monotonic()
        weight = self._weights[lab.name]
        try:
            if self._console.is_terminal:
                with self._bar(lab, began, weight) as step:
                    yield step
            else:
                yield lambda label: None
        finally:
            self._count += 1
            self._done += weight
            self._spent += time.monotonic() - began

    @contextmanager
    def _bar(self, lab: Lab, began: float, weight: float) -> Generator[Callable[[str], None]]:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[place]} {task.fields[lab]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]} left"),
            TextColumn("{task.description}", style="dim"),
        )
        total = sum(self._weights.values())
        place = f"{self._count + 1}/{len(self._weights)}"
        with Progress(*columns, console=self._console, transient=True, auto_refresh=False) as bars:
            bar = bars.add_task(
                "starting", total=total, place=place, lab=lab.name, left=_clock(total)
            )

            def step(label: str) -> None:
                inside = min(time.monotonic() - began, 0.95 * weight)
                left = time_left(self._done, self._spent, inside, total)
                bars.update(
                    bar, completed=self._done + inside, description=label[:48], left=_clock(left),
                    refresh=True,
                )  # fmt: skip

            step("starting")
            yield step


def time_left(done: float, spent: float, inside: float, total: float) -> float:
    """Seconds: what is left of the labs' own estimates, at the pace of those that have ended."""
    pace = spent / done if done > 0 else 1.0
    return max(total - done - inside, 0.0) * pace


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02}"
