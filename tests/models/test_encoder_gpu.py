"""Attention to both sides on a GPU: one call for all texts gives what one call for each gives."""

import pytest
import torch

from cairn.models.attend import Rule
from cairn.models.encoder.attend import Bidirectional

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("heads", "groups", "width"), [(12, 1, 64), (8, 2, 128), (12, 1, 32)])
@pytest.mark.parametrize("window", [0, 40])
def test_variable_lengths_equal_the_plain_form(heads, groups, width, window):
    lengths = [1, 3, 64, 65, 200, 200, 511]
    draw = torch.Generator("cuda").manual_seed(0)
    shapes = ((heads, width), (heads // groups, width), (heads // groups, width))
    q, k, v = (
        torch.randn(sum(lengths), *shape, device="cuda", dtype=torch.bfloat16, generator=draw)
        for shape in shapes
    )
    rule = Rule(0, width**-0.5, window)
    plain = Bidirectional(lengths, "cuda", plain=True)(q.float(), k.float(), v.float(), rule)
    fast = Bidirectional(lengths, "cuda")(q, k, v, rule)
    torch.testing.assert_close(fast.float(), plain, atol=2e-2, rtol=2e-2)
