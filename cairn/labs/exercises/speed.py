"""How near does an answer come to the speed of this GPU? Its time beside that of torch on the same data.

    if ON_GPU:

        @case("a copy's time", "一次拷贝的时间")
        def speed(attempt):
            return beside(lambda: attempt.softmax(x), lambda: y.copy_(x), allowed=2.0)

Cases of speed exist only where there is a GPU: a CPU and the interpreter say nothing about it.
"""

import os
from collections.abc import Callable

import torch

from cairn.hw.timing import measure
from cairn.labs.exercises.grading import Figure

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def beside(answer: Callable[[], object], limit: Callable[[], object], allowed: float) -> Figure:
    """Microseconds of both, in turn; past `allowed` times the limit the case fails."""
    times = [[measure(call, device="cuda", budget_ms=50).median_s for call in (answer, limit)]]
    times.append([measure(call, device="cuda", budget_ms=50).median_s for call in (answer, limit)])
    best_us = [min(pair) * 1e6 for pair in zip(*times, strict=True)]
    return Figure(best_us[0], best_us[1], "us", allowed=allowed)
