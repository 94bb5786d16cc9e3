"""NF4 against bitsandbytes, the oracle, and against its own definition."""

import pytest
import torch

from cairn.kernels.quantize.nf4 import LEVELS, dequantize_nf4, dynamic_map, quantize_nf4
from cairn.models.linear.nf4 import NF4Form

SHAPES = [(64, 64), (96, 320), (7, 64), (640, 512), (5, 13)]


def weights(shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_of_bitsandbytes(shape):
    bnb = pytest.importorskip(
        "bitsandbytes", reason="needs the oracle: pip install --no-deps bitsandbytes"
    )
    weight = weights(shape)
    packed, state = bnb.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    ours = quantize_nf4(weight)
    assert torch.equal(ours.packed, packed.flatten())
    assert _near_ties(ours, state) <= 0.005 * len(ours.scales)
    assert torch.equal(ours.scale_of_scales, state.state2.absmax)
    assert ours.mean == state.offset
    same = ours._replace(scales=state.absmax.flatten())
    theirs = bnb.functional.dequantize_4bit(packed, state)
    torch.testing.assert_close(dequantize_nf4(same, torch.float32), theirs, rtol=1e-6, atol=1e-6)


def _near_ties(ours, state):
    """Scales that differ: the oracle's CPU kernel may take the second-nearest level at a tie, which is checked."""
    differ = (ours.scales != state.absmax.flatten()).nonzero().flatten()
    levels = dynamic_map()
    assert torch.equal(levels, state.state2.code)
    ours_L, theirs_L = ours.scales[differ].int(), state.absmax.flatten()[differ].int()
    assert (ours_L - theirs_L).abs().eq(1).all()
    return len(differ)


def test_values_are_the_nearest_levels():
    weight = weights((32, 128))
    back = dequantize_nf4(quantize_nf4(weight), torch.float32)
    scale = weight.view(-1, 64).abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS)
    nearest = (
        levels[(weight.view(-1, 64)[..., None] / scale[..., None] - levels).abs().argmin(-1)]
        * scale
    )
    assert (back - nearest.view(weight.shape)).abs().max() < 0.02 * scale.max()
    assert 0.08 < (back - weight).norm() / weight.norm() < 0.105


def test_size_and_zeros():
    quantized = quantize_nf4(weights((1024, 1024)))
    assert 8 * quantized.nbytes / 2**20 == pytest.approx(4.127, abs=1e-3)
    assert not dequantize_nf4(quantize_nf4(torch.zeros(4, 64)), torch.float32).any()
    assert len(dynamic_map()) == 256


def test_product_and_its_gradient():
    weight, x = weights((48, 64)), weights((5, 64), 1).requires_grad_()
    form = NF4Form(weight)
    y = form.product(x, weights((48,), 2))
    plain = dequantize_nf4(form.quantized, torch.float32)
    torch.testing.assert_close(y, x @ plain.t() + weights((48,), 2))
    y.sum().backward()
    torch.testing.assert_close(x.grad, plain.sum(0).expand(5, 64))
