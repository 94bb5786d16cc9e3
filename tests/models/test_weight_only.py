"""Planes of any kind in the form that reads them packed: the same numbers, in no more bytes than needed."""

import pytest
import torch
from hypothesis import given, settings
from test_quantized_cuts import planes

from cairn.kernels.matmul.packed_weights import packed_reference
from cairn.kernels.matmul.weight_only import rows_reference, weight_only_matmul
from cairn.models.linear import packed_tiles
from cairn.models.linear.packed_tiles import E4M3, NVFP4, W8A16, PackedTiles
from cairn.models.linear.planes_form import PlanesForm
from cairn.models.linear.registry import fast_form
from cairn.models.linear.weight_only import WeightOnly
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.rounding import SCHEMES, rounded
from cairn.models.quantized.sharding import joined


@settings(max_examples=60, deadline=None)
@given(made=planes(columns=192))
def test_a_product_is_that_of_the_dequantised_matrix(made):
    form, x_MK = WeightOnly(made), torch.randn(3, 192)
    assert torch.allclose(form.product(x_MK), PlanesForm(made).product(x_MK), rtol=1e-4, atol=1e-3)


def test_columns_in_act_order_and_a_group_that_divides_no_span():
    made = rounded(torch.randn(8, 128), SCHEMES["mxfp4"])
    order_K = torch.randperm(128)
    made = type(made)(**{**vars(made), "order_K": order_K})
    x_MK = torch.randn(2, 128)
    assert torch.allclose(WeightOnly(made).product(x_MK), PlanesForm(made).product(x_MK), atol=1e-4)
    odd = rounded(torch.randn(8, 96), SCHEMES["q8_0"])
    assert "96 columns in groups of 48" in str(
        WeightOnly.obstacle(type(odd)(**{**vars(odd), "group": 48}))
    )


@pytest.mark.parametrize(("form", "scheme", "bits"), [(NVFP4, "nvfp4", 5), (W8A16, "w8a8", 8)])
def test_rounded_matrices_take_the_bits_of_their_form(form, scheme, bits):
    w_NK = torch.randn(64, 512)
    made, exact = form(w_NK), dequantized(rounded(w_NK, SCHEMES[scheme]))
    assert torch.allclose(packed_reference(made.weight), exact, rtol=1e-6)
    assert made.nbytes == 64 * 512 * bits / 8 + 64 * 4
    assert "100" in form.obstacle(torch.zeros(8, 100))


def test_matrices_of_nvfp4_with_scales_of_their_own_keep_them_when_they_are_joined():
    parts = [rounded(size * torch.randn(16, 128), SCHEMES["nvfp4"]) for size in (1.0, 3.0)]
    both = joined(parts)
    assert both.global_scale is None
    form = WeightOnly(both)
    assert form.weight.scales_NG.dtype == torch.float32
    assert WeightOnly(parts[0]).weight.scales_NG.dtype == E4M3
    exact = torch.cat([dequantized(part) for part in parts])
    assert torch.allclose(rows_reference(form.weight), exact, rtol=1e-6)


def test_another_gpu_than_hopper_takes_the_kernel_that_runs_anywhere(monkeypatch):
    made = rounded(torch.randn(128, 512), SCHEMES["nvfp4"])
    assert fast_form(made, "cuda") is PackedTiles
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(packed_tiles, "capability", lambda device: (8, 0))
    assert fast_form(made, "cuda") is WeightOnly


def test_on_a_gpu_every_scheme_has_a_kernel():
    for scheme, grid in SCHEMES.items():
        assert fast_form(rounded(torch.randn(128, 512), grid), "cuda") is not None, scheme


def test_what_does_not_fit_is_refused():
    w = WeightOnly(rounded(torch.randn(8, 128), SCHEMES["nvfp4"])).weight
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    for wrong, text in (
        (w._replace(kind="int5"), "kind"),
        (w._replace(values=w.values.to(torch.int8)), "values"),
        (w._replace(scales_NG=w.scales_NG[:, :3].contiguous()), "scales"),
        (w._replace(span=48), "span"),
    ):
        with pytest.raises(ValueError, match=f"w.{text}"):
            weight_only_matmul(x, wrong)
    with pytest.raises(ValueError, match="at most 128 rows"):
        weight_only_matmul(x.expand(129, 128), w)
