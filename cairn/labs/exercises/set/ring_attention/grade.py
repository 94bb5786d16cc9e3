import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close


def problem(length, scale=1.0):
    dice = torch.Generator().manual_seed(length)
    return [torch.randn(length, 8, generator=dice) * scale for _ in range(3)]


def wanted(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True
    )[0]


@case("one rank is plain attention", "单 rank 等于普通注意力")
def one(attempt: Attempt) -> None:
    parts = problem(12)
    close(attempt.ring_attention(*([part] for part in parts))[0], wanted(*parts))


@case("2, 3 and 4 ranks agree with the whole", "2、3、4 个 rank 与整体一致")
def several(attempt: Attempt) -> None:
    for ranks in (2, 3, 4):
        parts = problem(24, 2.0)
        cut = [part.chunk(ranks) for part in parts]
        close(torch.cat(attempt.ring_attention(*cut)), wanted(*parts))


@case("no token depends on later ones", "没有 token 依赖后文")
def causal(attempt: Attempt) -> None:
    parts = problem(24)
    first = torch.cat(attempt.ring_attention(*[part.chunk(3) for part in parts]))
    for part in parts[1:]:
        part[17:] += 5
    second = torch.cat(attempt.ring_attention(*[part.chunk(3) for part in parts]))
    close(first[:17], second[:17])


@case("blocks that are computed", "计算的块数")
def work(attempt: Attempt) -> Figure:
    calls, plain = 0, attempt.attend

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return plain(*args, **kwargs)

    attempt.attend = counted
    try:
        attempt.ring_attention(*[part.chunk(4) for part in problem(24)])
    finally:
        attempt.attend = plain
    return Figure(calls, 4 * 5 / 2, "blocks")
