"""How near does an answer come to the speed of this GPU? Its time beside that of torch on the same data.

    @case("a copy's time", "一次拷贝的时间")
    def speed(attempt):
        require_gpu()
        return beside(lambda: attempt.softmax(x), lambda: y.copy_(x), allowed=2.0)

Where there is no GPU such a case is not looked at: a CPU and the interpreter say nothing about speed.
"""

import os
from collections.abc import Callable

import torch

from cairn.hw.timing import measure
from cairn.labs.exercises.grading import Figure, NotHere

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def require_gpu() -> None:
    if not ON_GPU:
        raise NotHere(
            "not looked at: there is no GPU here, so its speed is not known",
            "未检查：本机没有 GPU，无法得知速度",
        )


def beside(answer: Callable[[], object], limit: Callable[[], object], allowed: float) -> Figure:
    """Microseconds of both, in turn; past `allowed` times the limit the case fails."""
    times = [
        [measure(call, device="cuda", budget_ms=50).median_s for call in (answer, limit)]
        for _ in range(2)
    ]
    best_us = [min(pair) * 1e6 for pair in zip(*times, strict=True)]
    return Figure(best_us[0], best_us[1], "us", allowed=allowed)
