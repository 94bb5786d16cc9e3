import torch

from cairn.labs.exercises.grading import Attempt, case, close, equal, require

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.0, -1.0])


@case("temperature scales the logits", "温度缩放 logits")
def temperature(attempt: Attempt) -> None:
    for t in (0.5, 1.0, 2.0):
        close(attempt.distribution(LOGITS, t, 0, 1.0, 0.0), torch.softmax(LOGITS / t, 0))


@case("temperature 0 is the argmax", "温度 0 即 argmax")
def greedy(attempt: Attempt) -> None:
    close(attempt.distribution(LOGITS, 0.0, 0, 1.0, 0.0), [0, 1, 0, 0, 0])


@case("top-k keeps k tokens", "top-k 保留 k 个")
def top_k(attempt: Attempt) -> None:
    expected = torch.softmax(LOGITS, 0) * torch.tensor([0, 1, 1, 0, 0])
    close(attempt.distribution(LOGITS, 1.0, 2, 1.0, 0.0), expected / expected.sum())
    close(attempt.distribution(LOGITS, 1.0, 99, 1.0, 0.0), torch.softmax(LOGITS, 0))


@case("top-p keeps the token that crosses p", "top-p 保留跨过 p 的 token")
def top_p(attempt: Attempt) -> None:
    found = attempt.distribution(LOGITS, 1.0, 0, 0.7, 0.0)  # 0.636 + 0.234 crosses 0.7
    equal([int(at) for at in found.nonzero().flatten()], [1, 2])
    close(attempt.distribution(LOGITS, 1.0, 0, 0.1, 0.0), [0, 1, 0, 0, 0])


@case("top-p works on what top-k left", "top-p 在 top-k 之后的分布上计算")
def both(attempt: Attempt) -> None:
    found = attempt.distribution(LOGITS, 1.0, 2, 0.72, 0.0)  # of the two, the first has 0.731
    close(found, [0, 1, 0, 0, 0])


@case("min-p is a share of the largest probability", "min-p 相对最大概率")
def min_p(attempt: Attempt) -> None:
    probs = attempt.distribution(
        LOGITS, 1.0, 0, 1.0, 0.3
    )  # exp(-1) = 0.37 stays, exp(-2) = 0.14 does not
    equal([int(at) for at in probs.nonzero().flatten()], [1, 2])
    close(probs.sum(), 1.0)


@case("draws follow the distribution", "采样符合分布")
def draws(attempt: Attempt) -> None:
    probs = torch.tensor([0.0, 0.25, 0.5, 0.25, 0.0])
    equal(
        [attempt.draw(probs, u) for u in (0.0, 0.2, 0.3, 0.74, 0.76, 0.999999999)],
        [1, 1, 2, 2, 3, 3],
    )
    require(
        attempt.draw(probs, 1 - 1e-12) == 3,
        "a token of probability 0 was drawn",
        "抽到了概率为 0 的 token",
    )
