"""Encoders on a GPU: attention of all texts in one call is that of each alone, and kernels compute what torch does."""

import pytest
import torch

from cairn.models.attend import AttentionRule
from cairn.models.build import ModelBuild
from cairn.models.encoder import model as form
from cairn.models.encoder.attend import Bidirectional
from cairn.models.encoder.spec import EncoderSpec
from cairn.models.layer_loop import PlainStep
from cairn.models.spec import ModelSpec
from cairn.models.weights import fill_random

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
    rule = AttentionRule(0, width**-0.5, window)
    plain = Bidirectional(lengths, "cuda", plain=True)(q.float(), k.float(), v.float(), rule)
    fast = Bidirectional(lengths, "cuda")(q, k, v, rule)
    torch.testing.assert_close(fast.float(), plain, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_kernels_err_no_more_than_torch_in_bfloat16(activation, monkeypatch):
    """Enough tokens that GELU is in the product's epilogue; the truth is torch in float32."""
    shape = ModelSpec(
        family="bert", vocab=500, hidden=256, layers=3, heads=4, kv_heads=4, head_dim=64,
        intermediate=512, context=512, tied=True, norm="layer", qkv_bias=True, out_bias=True,
        mlp_bias=True, gated=False, activation=activation, positions="learned",
    )  # fmt: skip
    lengths = [3, 17, 400, 400, 250, 511]
    tokens_T = torch.randint(0, 500, (sum(lengths),), device="cuda")

    @torch.inference_mode()
    def states(dtype: torch.dtype) -> torch.Tensor:
        model = form.Encoder(
            EncoderSpec(shape, token_types=2), ModelBuild("meta", dtype, fused=True)
        )
        fill_random(model, model.slots(), torch.device("cuda"), 0)
        attend = Bidirectional(lengths, "cuda")
        return model(tokens_T, attend.positions_T(), attend).float()

    truth, ours = states(torch.float32), states(torch.bfloat16)
    monkeypatch.setattr(
        form, "packed_step", lambda x, attend, spec, turns: PlainStep(attend, turns)
    )
    natural = (states(torch.bfloat16) - truth).abs().mean()
    assert (ours - truth).abs().mean() <= 1.2 * natural
