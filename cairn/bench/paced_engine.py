"""An engine without a model: the real scheduler, loop and thread over a simulated device that only waits.

    step --> PacedRunner: every sampling request gets the next word of a text it repeats, `step_seconds` later

So a server can be measured under load as if it had an accelerator: its rows, pages and step times are real, its
answers are made up. `capacity` says how many answers such an engine makes in a second.
"""

import time
from collections.abc import Callable
from typing import Any, cast

import torch

from cairn.models.runnable import OpenModel
from cairn.serve.engine.adapters import Adapters
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Landed
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.step import Step
from cairn.serve.engine_thread import EngineThread
from cairn.serve.serving import Serving

TEXT = (
    "A cairn is a pile of stones that marks a path: each traveller adds one, and those who come later find the way. "
    "The café at its foot serves „Brötchen“, 日本茶 and \\backslashes\\ with 1,234 kinds of jam 🎉.\n\n"
)

StepSeconds = Callable[[Step], float]


class PacedFlight:
    def __init__(self, step: Step, tokens: list[int], due: float) -> None:
        self.step, self._tokens, self._due = step, tokens, due

    def land(self) -> Landed:
        left = self._due - time.monotonic()
        if left > 0:
            time.sleep(left)
        return Landed(self._tokens, {}, {})


class PacedRunner:
    """A device whose steps end one after the other, each `step_seconds` after the one before.

    A step that is launched at most `ahead_s` after the one before has ended takes as long as if it had been launched
    ahead: the time of the host between them is not counted.
    """

    device = torch.device("cpu")
    head = None  # that would draft tokens

    def __init__(self, words: list[int], step_seconds: StepSeconds, ahead_s: float = 0.0) -> None:
        self._words, self._step_seconds, self._ahead_s = words, step_seconds, ahead_s
        self._free = 0.0  # when the device has done what it was given
        self.adapters = Adapters(cast(Any, None), obstacle="a paced device computes nothing")

    def launch(self, step: Step) -> PacedFlight:
        words, count = self._words, len(self._words)
        tokens = [words[(r.arrival * 7 + len(r.outputs)) % count] for r in step.sampling]
        now = time.monotonic()
        began = self._free if now <= self._free + self._ahead_s else now
        self._free = began + self._step_seconds(step)
        return PacedFlight(step, tokens, self._free)


def paced_engine(
    opened: OpenModel,
    limits: Limits,
    step_seconds: StepSeconds,
    prefix_caching: bool = False,
    ahead_s: float = 0.0,
) -> Engine:
    words = [5, 6, 7] if opened.tokenizer is None else opened.tokenizer.encode(TEXT, special=False)
    runner = PacedRunner(words, step_seconds, ahead_s)
    scheduler = Scheduler(limits, prefix_caching=prefix_caching)
    return Engine(scheduler, cast(Any, runner), overlap=False)


def paced_serving(
    opened: OpenModel,
    limits: Limits,
    step_seconds: StepSeconds,
    name: str,
    prefix_caching: bool = False,
    ahead_s: float = 0.0,
) -> Serving:
    """A paced engine in a thread, for a `Service`."""
    engine = EngineThread(paced_engine(opened, limits, step_seconds, prefix_caching, ahead_s))
    return Serving(opened, limits, engine, names=[name])


def capacity(rows: int, step_s: float, tokens: float) -> float:
    """Answers of so many tokens that come in a second, when every row is always taken and a step takes so long."""
    return rows / (tokens * step_s)
