"""Learning-rate schedules: pure functions from a step to a share of the full rate.

    1 |    ______                   ___________              \\
      |   /      \\_               /           \\              \\__
      |  /         \\_            /             \\                \\____
      | /            `---        /               \\                   `-----
       warm-up + cosine          wsd: warm, stable, decay      inverse square root

All begin with a linear warm-up. Cosine, linear and wsd end at `final`; the others do not know where the end is. Steps
count from 0; the step `steps - 1` is the last. No state: a resumed run asks the same question and gets the same answer.
"""

import math

from cairn.train.config import Schedule


def rate(schedule: Schedule, step: int, steps: int) -> float:
    """The share of the full rate in this step, above 0 and at most 1."""
    warmup = schedule.warmup
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if schedule.kind == "constant":
        return 1.0
    if schedule.kind == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / max(step, 1, warmup))
    if schedule.kind == "wsd":
        decay_steps = round(schedule.decay * steps)
        begin = max(warmup, steps - decay_steps)
        return _fall(_progress(step, begin, steps), schedule.final)
    done = _progress(step, warmup, steps)
    if schedule.kind == "linear":
        return _fall(done, schedule.final)
    return schedule.final + (1 - schedule.final) * 0.5 * (1 + math.cos(math.pi * done))


def _progress(step: int, begin: int, steps: int) -> float:
    """0 up to `begin`, 1 at the last step."""
    if step < begin:
        return 0.0
    return min(1.0, (step - begin) / max(1, steps - 1 - begin))


def _fall(done: float, final: float) -> float:
    return 1.0 + (final - 1.0) * done
