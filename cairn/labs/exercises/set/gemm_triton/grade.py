import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close
from cairn.labs.exercises.speed import ON_GPU, beside, require_gpu

DEVICE = "cuda" if ON_GPU else "cpu"


def made(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)


@case("whole tiles", "整块")
def whole(attempt: Attempt) -> None:
    a, b = made(32, 16), made(16, 32)
    close(attempt.matmul(a, b), a @ b, 1e-2)


@case("several blocks of K, the last one short", "多个 K 块且最后一块不满")
def ragged(attempt: Attempt) -> None:
    a, b = made(20, 37), made(37, 18)
    close(attempt.matmul(a, b), a @ b, 1e-2)


@case("a transposed view", "转置视图")
def transposed(attempt: Attempt) -> None:
    a, b = made(24, 20).T, made(17, 24).T
    close(attempt.matmul(a, b), a @ b, 1e-2)


@case("on this GPU in bf16, beside cuBLAS", "在本机 GPU 上用 bf16，与 cuBLAS 相比")
def speed(attempt: Attempt) -> Figure:
    require_gpu()
    a, b = made(4096, 4096).bfloat16(), made(4096, 4096).bfloat16()
    return beside(lambda: attempt.matmul(a, b), lambda: a @ b, allowed=4.0)
