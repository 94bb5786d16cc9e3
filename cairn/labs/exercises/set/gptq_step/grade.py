import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close


def problem():
    dice = torch.Generator().manual_seed(0)
    weight = torch.randn(16, 24, generator=dice, dtype=torch.float64)
    mix = torch.randn(24, 24, generator=dice, dtype=torch.float64)
    low = mix[:, :8] @ torch.randn(8, 200, generator=dice, dtype=torch.float64)
    return weight, low + 0.3 * torch.randn(24, 200, generator=dice, dtype=torch.float64)


@case("every weight is a multiple of the step", "每个权重都是步长的倍数")
def multiples(attempt: Attempt) -> None:
    weight, inputs = problem()
    steps = attempt.gptq(weight, inputs, 0.25) / 0.25
    close(steps, steps.round(), 1e-9)


@case("the weights that were given are untouched", "不改动输入的权重")
def untouched(attempt: Attempt) -> None:
    weight, inputs = problem()
    attempt.gptq(weight, inputs, 0.25)
    close(weight, problem()[0], 0)


@case("a fine step changes almost nothing", "步长很小时几乎不变")
def fine(attempt: Attempt) -> None:
    weight, inputs = problem()
    close(attempt.gptq(weight, inputs, 1e-6) @ inputs, weight @ inputs, 1e-4)


@case("error of the output against rounding to nearest", "输出误差与就近舍入之比")
def error(attempt: Attempt) -> Figure:
    weight, inputs = problem()
    made = attempt.gptq(weight, inputs, 0.5)
    nearest = (weight / 0.5).round() * 0.5
    lost = [float(((w - weight) @ inputs).norm()) for w in (made, nearest)]
    return Figure(lost[0] / lost[1], 0.55, "x")
