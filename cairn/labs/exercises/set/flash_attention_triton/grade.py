import torch

from cairn.labs.exercises.grading import Attempt, case, close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def made(length, scale=1.0):
    dice = torch.Generator().manual_seed(length)
    return [torch.randn(length, 16, generator=dice).to(DEVICE) * scale for _ in range(3)]


def wanted(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(
        q[None], k[None], v[None], is_causal=True
    )[0]


@case("one block", "单块")
def one(attempt: Attempt) -> None:
    parts = made(16)
    close(attempt.attention(*parts), wanted(*parts), 1e-2)


@case("three blocks, the last one short", "三块且最后一块不满")
def several(attempt: Attempt) -> None:
    parts = made(41)
    close(attempt.attention(*parts), wanted(*parts), 1e-2)


@case("large scores that rise along the keys", "沿 key 递增的大分数")
def rising(attempt: Attempt) -> None:
    q, k, v = made(48, 2.0)
    k = k * torch.linspace(0.1, 4, 48, device=DEVICE)[:, None]
    close(attempt.attention(q, k, v), wanted(q, k, v), 1e-2)
