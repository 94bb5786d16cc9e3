"""One pass over a gradient in the interpreter, against the two products in float64."""

import cairn.kernels.interpret  # noqa: F401  isort: skip
import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.adapter.lora_slopes import lora_slopes, lora_slopes_reference


@pytest.mark.parametrize(
    ("rows", "parts", "rank"), [(300, (40, 24, 72), 16), (70, (96, 64), 32), (5, (17,), 16)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_slopes(rows, parts, rank, dtype):
    columns, ranks = sum(parts), rank * len(parts)
    wide = torch.randn(rows, columns + 3).to(dtype)  # rows that lie apart
    g, h = wide[:, :columns], torch.randn(rows, ranks + 8).to(dtype)[:, 8:]
    b = torch.randn(columns, rank).to(dtype)
    found = lora_slopes(g, b, h, parts, 2.0, impl="triton")
    exact = lora_slopes_reference(g.double(), b.double(), h.double(), parts, 2.0)
    assert [one.shape for one in found] == [(rows, ranks), (columns, rank)]
    for mine, true in zip(found, exact, strict=True):
        assert relative_error(mine, true) < (1e-6 if dtype == torch.float32 else 4e-3)


def test_no_rows():
    found = lora_slopes(torch.zeros(0, 32), torch.ones(32, 16), torch.zeros(0, 16), [32], 1.0)
    assert found[0].shape == (0, 16)
    assert not found[1].any()
