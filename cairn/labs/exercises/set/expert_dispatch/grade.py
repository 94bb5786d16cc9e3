import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close, require


def problem(experts=6, tokens=20):
    dice = torch.Generator().manual_seed(experts)
    x = torch.randn(tokens, 8, generator=dice)
    weights = torch.randn(experts, 8, 8, generator=dice)
    return x, torch.randn(8, experts, generator=dice), weights


def wanted(x, router, weights, k):
    probs = torch.softmax(x @ router, -1)
    out = torch.zeros_like(x)
    for t in range(len(x)):
        best = probs[t].topk(k)
        for p, e in zip(best.values / best.values.sum(), best.indices, strict=True):
            out[t] += p * (x[t] @ weights[e])
    return out


@case("top-1 and top-2 agree with a loop over tokens", "top-1、top-2 与逐 token 循环一致")
def agrees(attempt: Attempt) -> None:
    for k in (1, 2, 3):
        x, router, weights = problem()
        made = attempt.dispatch(x, router, [lambda rows, w=w: rows @ w for w in weights], k)
        close(made, wanted(x, router, weights, k))


@case("an expert that no token chose is not called", "没有 token 的专家不被调用")
def unused(attempt: Attempt) -> None:
    x, router, weights = problem()
    x, router[0] = x.abs(), router[0] + 5
    router[:, 3] = -50

    def refuse(rows):
        require(False, "expert 3 was called", "专家 3 被调用了")

    experts = [refuse if e == 3 else (lambda rows, w=w: rows @ w) for e, w in enumerate(weights)]
    close(attempt.dispatch(x, router, experts, 2), wanted(x, router, weights, 2))


@case("calls of experts", "专家调用次数")
def calls(attempt: Attempt) -> Figure:
    x, router, weights = problem(4, 64)
    count = 0

    def counted(rows, w):
        nonlocal count
        count += 1
        return rows @ w

    attempt.dispatch(x, router, [lambda rows, w=w: counted(rows, w) for w in weights], 2)
    return Figure(count, 4, "calls")
