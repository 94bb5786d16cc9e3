import torch

from cairn.labs.exercises.grading import Attempt, case, close


def problem():
    torch.manual_seed(0)
    return [torch.randn(*shape) for shape in ((5, 4), (12, 4), (12,), (4, 12), (4,))]


def wanted(x, up, a, down, b):
    return torch.relu(x @ up.T + a) @ down.T + b


@case("one rank is the plain layer", "单 rank 等于普通层")
def one(attempt: Attempt) -> None:
    close(attempt.feed_forward(*problem(), 1), wanted(*problem()))


@case("2, 3 and 4 ranks give the same", "2、3、4 个 rank 结果相同")
def several(attempt: Attempt) -> None:
    for ranks in (2, 3, 4):
        close(attempt.feed_forward(*problem(), ranks), wanted(*problem()))


@case("without inputs only the biases are left", "输入为零时只剩偏置")
def biases(attempt: Attempt) -> None:
    x, up, a, down, b = problem()
    close(attempt.feed_forward(x * 0, up, a, down, b, 4), wanted(x * 0, up, a, down, b))
