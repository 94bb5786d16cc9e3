"""Progress display of a run: a bar on a terminal, else a line for each logged step, both with ETA.

    training  ━━━━━━━━╌╌╌╌╌╌╌╌  212/480  0:33 left  loss 2.113 ▇▅▄▃▂▂▁ 48.2k tokens/s
    step 10/480 loss 3.2114 48.2k tokens/s, 1:12 left

One object serves all processes of a run: each draws what it is given, and only rank 0 is given anything.
"""

import math
import sys
from collections import deque
from typing import TYPE_CHECKING, TextIO

from cairn.core.units import format_count
from cairn.report.progress import Bar, StatusLine, clock_time

if TYPE_CHECKING:
    from cairn.train.metrics_log import Record

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 20  # steps whose mean time gives the time left


class Display:
    def __init__(
        self, steps: int, every: int, as_json: bool = False, err: TextIO | None = None
    ) -> None:
        """`every`: steps between two lines. `as_json`: stdout is for the document, so words go to stderr."""
        self.steps, self.every, self.as_json = steps, every, as_json
        self._err = sys.stderr if err is None else err
        self._bar: Bar | None = None
        self._losses: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT)

    def log_line(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.clear()
        print(text, file=self._err if self.as_json else sys.stdout, flush=True)

    def on_record(self, record: "Record") -> None:
        """A step is done."""
        self._recent.append(record.seconds)
        if self._bar is None:
            self._bar = Bar("training", self.steps, done=record.step - 1, stream=self._err)
        if not self._bar.shown:
            if record.step % self.every == 0 or record.step in (1, self.steps):
                print(self._line(record), file=self._err, flush=True)
            return
        self._losses.append(math.nan if record.loss is None else record.loss)
        share = f", MFU {record.mfu:.0%}" if record.mfu is not None else ""
        speed = f"{format_count(record.tokens_per_s)} tokens/s{share}"
        words = f"loss {self._losses[-1]:z.3f} {curve(self._losses)} {_metrics(record)}{speed}"
        self._bar.update(record.step, words, left_s=self._left_s(record.step))

    def close(self) -> None:
        """Remove the bar, which another process of the run may have drawn."""
        StatusLine(self._err).clear()

    def _line(self, record: "Record") -> str:
        loss = "not finite" if record.loss is None else f"{record.loss:z.4f}"
        speed = format_count(record.tokens_per_s)
        left = f", {clock_time(self._left_s(record.step))} left" if record.step < self.steps else ""
        return (
            f"step {record.step}/{self.steps} loss {loss} {_metrics(record)}{speed} tokens/s{left}"
        )

    def _left_s(self, step: int) -> float:
        return (self.steps - step) * sum(self._recent) / len(self._recent)


def curve(losses: list[float], width: int = 16) -> str:
    """The losses so far as a line of blocks, the newest at the right."""
    step = max(1, len(losses) // width)
    shown = [loss for loss in losses[::-1][::step][:width][::-1] if math.isfinite(loss)]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0
    return "".join(BLOCKS[round((loss - low) * scale)] for loss in shown)


def _metrics(record: "Record") -> str:
    """Metrics of the objective besides its loss."""
    return "".join(f"{name} {value:.3g} " for name, value in record.metrics.items())
