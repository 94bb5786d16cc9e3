"""Quantising on a GPU: the recorded loop is the plain one, and the result is that of a CPU."""

import pytest
import torch

from cairn.compress.gptq import GraphedColumns, gptq
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.rounding import SCHEMES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("scheme", ["w4a16", "w8a8", "fp8"])
@pytest.mark.parametrize("ordered", [True, False])
def test_the_recorded_loop_is_the_plain_one(scheme: str, ordered: bool):
    columns = GraphedColumns()
    for seed in range(3):  # the second and third replay what the first has recorded
        generator = torch.Generator("cuda").manual_seed(seed)
        w_NK = torch.randn(384, 512, device="cuda", generator=generator)
        x_MK = torch.randn(900, 512, device="cuda", generator=generator)
        x_MK *= torch.logspace(0, -2, 512, device="cuda")
        arguments = (w_NK, x_MK.t() @ x_MK, SCHEMES[scheme], torch.bfloat16, "w", ordered)
        plain, recorded = gptq(*arguments), gptq(*arguments, columns)
        assert torch.equal(plain.levels_NK, recorded.levels_NK)
        assert torch.equal(plain.scales, recorded.scales)


def test_a_gpu_rounds_as_a_cpu_does():
    generator = torch.Generator().manual_seed(3)
    w_NK, x_MK = (
        torch.randn(64, 256, generator=generator),
        torch.randn(600, 256, generator=generator),
    )
    made = []
    for device in ("cpu", "cuda"):
        w, x = w_NK.to(device), x_MK.to(device)
        planes = gptq(w, x.t() @ x, SCHEMES["w4a16"], torch.bfloat16)
        made.append((x @ (dequantized(planes) - w).t()).norm().item())
    assert made[0] == pytest.approx(made[1], rel=0.01)
