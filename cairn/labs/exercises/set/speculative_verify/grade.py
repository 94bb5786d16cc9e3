import torch

from cairn.labs.exercises.grading import Attempt, case, close, equal

P = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8], [0.2, 0.2, 0.6]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.7, 0.1], [0.3, 0.3, 0.4]], dtype=torch.float64)


@case("a token that the target likes more is always kept", "目标更偏好的 token 必被接受")
def kept(attempt: Attempt) -> None:
    equal(attempt.verify([0, 2], Q, P, [0.999, 0.999], 0.5), [0, 2, 2])


@case("k proposals can give k + 1 tokens", "k 个候选最多产出 k + 1 个 token")
def bonus(attempt: Attempt) -> None:
    equal(attempt.verify([1, 0], Q, P, [0.4, 0.3], 0.1), [1, 0, 0])
    equal(attempt.verify([], Q[:0], P[:1], [], 0.6), [1])


@case("a rejection ends the run with a token of the residual", "拒绝后从残差分布补一个")
def rejected(attempt: Attempt) -> None:
    equal(attempt.verify([1, 2], Q, P, [0.9, 0.0], 0.7), [0])  # residual of row 0: 0.75, 0, 0.25
    equal(attempt.verify([1, 2], Q, P, [0.9, 0.0], 0.8), [2])
    equal(attempt.verify([0, 0], Q, P, [0.0, 0.9], 0.5), [0, 2])


@case("the first token is distributed as the target's", "首个 token 的分布等于目标分布")
def unbiased(attempt: Attempt) -> None:
    grid = [(at + 0.5) / 20 for at in range(20)]
    mass = torch.zeros(3, dtype=torch.float64)
    for token in range(3):
        for u in grid:
            for last in grid:
                first = attempt.verify([token], Q[:1], P[:2], [u], last)[0]
                mass[first] += float(Q[0][token]) / len(grid) ** 2
    close(mass, P[0], 0.03)
