"""Time since the engine's last step; the client compares it with its limit and restarts a hanging engine."""

import time


class Watchdog:
    """Steps taken, and when the time without a step began. A moment in the future is a time of grace."""

    def __init__(self) -> None:
        self.steps = 0
        self._since = time.monotonic()

    @property
    def still_s(self) -> float:
        """Seconds without a step; negative during a time of grace."""
        return time.monotonic() - self._since

    def note_steps(self, steps: int) -> None:
        """The engine has reported how many steps it has taken."""
        if steps != self.steps:
            self.steps = steps
            self._since = time.monotonic()

    def note_work(self) -> None:
        """Record progress other than a step."""
        self._since = time.monotonic()

    def note_first_request(self) -> None:
        """An idle engine takes no steps: count from here, unless a time of grace is longer."""
        self._since = max(self._since, time.monotonic())

    def new_group(self, grace_s: float = 0.0) -> None:
        """Other workers, which begin at step 0 and may take this long to load."""
        self.steps = 0
        self._since = time.monotonic() + grace_s
