import math

import torch

from cairn.labs.exercises.grading import Attempt, case, close, equal, require


def problem(keys: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(keys)
    return torch.randn(keys, generator=dice) * scale, torch.randn(keys, 4, generator=dice)


@case("one block agrees with torch.softmax", "单个分块与 torch.softmax 一致")
def one_block(attempt: Attempt) -> None:
    scores, values = problem(16)
    close(attempt.finish(attempt.attend(scores, values, 16)), torch.softmax(scores, 0) @ values)


@case("blocks of any length agree", "任意分块长度都一致")
def any_block(attempt: Attempt) -> None:
    scores, values = problem(37, 3.0)
    for block in (1, 2, 5, 36, 64):
        close(
            attempt.finish(attempt.attend(scores, values, block)), torch.softmax(scores, 0) @ values
        )


@case("scores of 1,000 do not overflow", "分数达 1000 也不溢出")
def large(attempt: Attempt) -> None:
    scores, values = problem(24, 400.0)
    close(
        attempt.finish(attempt.attend(scores + 1000, values, 4)), torch.softmax(scores, 0) @ values
    )


@case("masked blocks count for nothing", "被掩码的块不起作用")
def masked(attempt: Attempt) -> None:
    scores, values = problem(12)
    scores[:8] = -math.inf
    close(attempt.finish(attempt.attend(scores, values, 4)), torch.softmax(scores, 0) @ values)
    state = attempt.attend(torch.full((4,), -math.inf), values[:4], 2)
    close(attempt.finish(state), torch.zeros(4))


@case("two halves merge into the whole", "两半可合并成整体")
def merged(attempt: Attempt) -> None:
    scores, values = problem(40, 5.0)
    left = attempt.attend(scores[:13], values[:13], 4)
    right = attempt.attend(scores[13:] + 30, values[13:], 8)
    shifted = torch.cat([scores[:13], scores[13:] + 30])
    close(attempt.finish(attempt.merge(left, right)), torch.softmax(shifted, 0) @ values)
    equal(attempt.merge(left, right)[0], max(left[0], right[0]))


@case("the state holds no list of scores", "状态里不保存分数列表")
def small_state(attempt: Attempt) -> None:
    scores, values = problem(64)
    maximum, total, output = attempt.attend(scores, values, 8)
    require(float(maximum) == float(scores.max()), "m is not the maximum", "m 不是最大值")
    close(total, float(torch.exp(scores - scores.max()).sum()))
    equal(tuple(output.shape), (4,))
