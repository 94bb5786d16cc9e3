import torch

from cairn.labs.exercises.grading import Attempt, Figure, case, close, equal, require


def weights() -> torch.Tensor:
    tensor = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
    tensor[0, 0] = 40.0  # an outlier
    return tensor


@case("two nibbles lie as the format says", "两个半字节的位置符合格式")
def layout(attempt: Attempt) -> None:
    packed = attempt.pack(torch.tensor([[1, 2, 15, 8]], dtype=torch.uint8))
    equal(packed.tolist(), [[0x21, 0x8F]])


@case("integers survive the round trip", "整数往返不变")
def round_trip(attempt: Attempt) -> None:
    weight = torch.arange(-7, 8).repeat(2)[:16].float().reshape(1, 16)
    weight[0, -1] = 7
    close(attempt.dequantize(*attempt.quantize(weight, 16)), weight)


@case("half the bytes, a scale per group", "字节减半，每组一个缩放")
def sizes(attempt: Attempt) -> None:
    packed, scale = attempt.quantize(weights(), 16)
    equal((tuple(packed.shape), packed.dtype, tuple(scale.shape)), ((6, 32), torch.uint8, (6, 4)))


@case("a group of zeros stays zero", "全零的组保持为零")
def zeros(attempt: Attempt) -> None:
    close(attempt.dequantize(*attempt.quantize(torch.zeros(2, 8), 4)), torch.zeros(2, 8))


@case("error in steps of the group's scale", "误差（以组缩放为步长）")
def error(attempt: Attempt) -> Figure:
    weight = weights()
    packed, scale = attempt.quantize(weight, 16)
    back = attempt.dequantize(packed, scale)
    wanted = weight.reshape(6, 4, 16).abs().amax(-1) / 7
    steps = (weight - back).abs().reshape(6, 4, 16) / wanted[..., None]
    require(torch.isfinite(steps).all(), "not finite", "有非有限值")
    return Figure(float(steps.max()), 0.5, "steps", allowed=1.001)
