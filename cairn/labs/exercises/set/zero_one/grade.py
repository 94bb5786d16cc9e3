import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close, equal


def train(attempt: Attempt, ranks: int, size: int = 11):
    torch.manual_seed(1)
    weights = torch.randn(size)
    plain, velocity = weights.clone(), torch.zeros(size)
    mine = attempt.ZeroOne(weights, ranks, 0.1, 0.9)
    for _ in range(5):
        grads = [torch.randn(size) for _ in range(ranks)]
        mine.step(grads)
        velocity = 0.9 * velocity + torch.stack(grads).mean(0)  # plain SGD with momentum
        plain -= 0.1 * velocity
    return mine, plain


@case("one rank is plain SGD with momentum", "单 rank 等于带动量的 SGD")
def one(attempt: Attempt) -> None:
    mine, plain = train(attempt, 1)
    close(mine.weights, plain)


@case(
    "2, 3 and 4 ranks equal the whole batch, also where they do not divide",
    "2、3、4 个 rank 与整批一致（不整除也行）",
)
def several(attempt: Attempt) -> None:
    for ranks in (2, 3, 4):
        mine, plain = train(attempt, ranks)
        close(mine.weights, plain)


@case("every rank has a velocity of its own", "每个 rank 有自己的动量")
def states(attempt: Attempt) -> None:
    equal(len(train(attempt, 4)[0].velocity), 4)


@case("state of a rank, numbers", "每个 rank 的状态量")
def memory(attempt: Attempt) -> Figure:
    mine, _ = train(attempt, 4, 40)
    return Figure(max(part.numel() for part in mine.velocity), 40 / 4, "numbers")
