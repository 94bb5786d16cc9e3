import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close
from cairn.labs.exercises.speed import ON_GPU, beside, require_gpu

DEVICE = "cuda" if ON_GPU else "cpu"


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


@case(
    "on this GPU, beside attention that writes its scores",
    "在本机 GPU 上，与写出分数矩阵的 attention 相比",
)
def speed(attempt: Attempt) -> Figure:
    require_gpu()
    q, k, v = (torch.randn(8192, 64, device=DEVICE) for _ in range(3))
    hidden = torch.ones(8192, 8192, dtype=torch.bool, device=DEVICE).triu(1)

    def plain() -> torch.Tensor:
        return (q @ k.T / 8).masked_fill_(hidden, -1e30).softmax(-1) @ v

    return beside(lambda: attempt.attention(q, k, v), plain, allowed=1.0)
