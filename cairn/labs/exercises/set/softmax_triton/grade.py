import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close
from cairn.labs.exercises.speed import ON_GPU, beside, require_gpu

DEVICE = "cuda" if ON_GPU else "cpu"


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@case("rows of 64", "每行 64 个")
def power(attempt: Attempt) -> None:
    close(attempt.softmax(made(3, 64)), torch.softmax(made(3, 64), -1))


@case("rows of 77, all negative", "每行 77 个，全为负")
def ragged(attempt: Attempt) -> None:
    x = made(5, 77) - 30
    close(attempt.softmax(x), torch.softmax(x, -1))


@case("scores of 500 do not overflow", "分数 500 不溢出")
def large(attempt: Attempt) -> None:
    x = made(2, 33) * 20 + 500
    close(attempt.softmax(x), torch.softmax(x, -1))


@case("on this GPU, beside a copy of the same bytes", "在本机 GPU 上，与拷贝同样字节相比")
def speed(attempt: Attempt) -> Figure:
    require_gpu()
    x = made(8192, 4096)
    y = torch.empty_like(x)
    return beside(lambda: attempt.softmax(x), lambda: y.copy_(x), allowed=2.0)
