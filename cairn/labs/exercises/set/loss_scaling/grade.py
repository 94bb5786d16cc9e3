import torch

from cairn.labs.exercises.grading import Attempt, case, close, equal, require


@case("gradients come back in their own size", "梯度还原为原来的大小")
def unscaled(attempt: Attempt) -> None:
    (grad,) = attempt.LossScaler(1024.0).unscale([torch.full((3,), 512.0, dtype=torch.float16)])
    close(grad, [0.5] * 3)
    equal(grad.dtype, torch.float32)


@case("what underflows in fp16 survives", "fp16 下溢的梯度得以保留")
def small(attempt: Attempt) -> None:
    true = 1e-9
    scaled = torch.tensor([true * 65536], dtype=torch.float16)
    (grad,) = attempt.LossScaler(65536.0).unscale([scaled])
    require(
        abs(float(grad) / true - 1) < 0.01,
        f"{float(grad):.3g} instead of 1e-9",
        f"得到 {float(grad):.3g}，应为 1e-9",
    )


@case("a step with inf or NaN is skipped and the scale halves", "出现 inf 或 NaN 时跳过并减半")
def skipped(attempt: Attempt) -> None:
    scaler = attempt.LossScaler(8.0)
    for bad in (float("inf"), float("nan"), -float("inf")):
        equal(scaler.unscale([torch.ones(2), torch.tensor([1.0, bad])]), None)
    equal(scaler.scale, 1.0)
    equal(scaler.unscale([torch.tensor([float("inf")])]), None)
    equal(scaler.scale, 1.0)


@case("good steps double the scale, once an interval", "正常步每个间隔加倍一次")
def grows(attempt: Attempt) -> None:
    scaler, scales = attempt.LossScaler(4.0, 3), []
    for _ in range(7):
        scaler.unscale([torch.ones(1)])
        scales.append(scaler.scale)
    equal(scales, [4, 4, 8, 8, 8, 16, 16])


@case("a skip starts the count anew", "跳过后重新计数")
def resets(attempt: Attempt) -> None:
    scaler = attempt.LossScaler(4.0, 3)
    for value in (1.0, 1.0, float("inf"), 1.0, 1.0):
        scaler.unscale([torch.tensor([value])])
    equal(scaler.scale, 2.0)
