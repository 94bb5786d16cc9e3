import torch

from cairn.labs.exercises.grading import Attempt, case, close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
