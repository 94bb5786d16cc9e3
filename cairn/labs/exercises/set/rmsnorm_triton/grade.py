import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close
from cairn.labs.exercises.speed import ON_GPU, beside, require_gpu

DEVICE = "cuda" if ON_GPU else "cpu"


def wanted(x, w, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w.double()


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@case("a power of two", "列数为 2 的幂")
def power(attempt: Attempt) -> None:
    x, w = made(3, 64), made(64)
    close(attempt.rmsnorm(x, w, 1e-6), wanted(x, w, 1e-6))


@case("100 columns", "列数为 100")
def ragged(attempt: Attempt) -> None:
    x, w = made(4, 100), made(100)
    close(attempt.rmsnorm(x, w, 1e-6), wanted(x, w, 1e-6))


@case("rows with a stride", "行有步长")
def strided(attempt: Attempt) -> None:
    x, w = made(4, 96)[:, :48], made(48)
    close(attempt.rmsnorm(x, w, 1e-6), wanted(x, w, 1e-6))


@case("a row of zeros stays finite", "全零行结果有限")
def zeros(attempt: Attempt) -> None:
    close(attempt.rmsnorm(torch.zeros(2, 20, device=DEVICE), made(20), 1e-5), torch.zeros(2, 20))


@case("on this GPU, beside a copy of the same bytes", "在本机 GPU 上，与拷贝同样字节相比")
def speed(attempt: Attempt) -> Figure:
    require_gpu()
    x, w = made(8192, 4096), made(4096)
    y = torch.empty_like(x)
    return beside(lambda: attempt.rmsnorm(x, w, 1e-6), lambda: y.copy_(x), allowed=2.0)
