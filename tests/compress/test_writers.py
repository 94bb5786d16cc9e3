"""What we write is what transformers reads: every scheme as compressed-tensors, and GGUF against the gguf package."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import UnsupportedModel
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.checkpoint_names import source
from cairn.models.quantized.planes import dequantized
from cairn.models.quantized.round_model import round_model, split_rows
from cairn.models.quantized.rounding import (
    SCHEMES,
    QuantizationGrid,
    fitted,
    nearest_levels,
    rounded,
    rounded_activations,
)
from cairn.models.quantized.write import QuantizedModel, pack, write_compressed_tensors
from cairn.models.spec import ModelSpec, Rope
from cairn.models.weights import random_model

GRIDS = {
    name: fitted(name, [128, 256])[0]
    for name in ("w4a16", "w8a8", "fp8", "fp8-block", "mxfp4", "nvfp4")
}
GRIDS["w4a16-asymmetric"] = QuantizationGrid("int4", 32, symmetric=False)


def tiny() -> ModelSpec:
    return ModelSpec(
        family="llama", vocab=160, hidden=128, layers=2, heads=8, kv_heads=2, head_dim=16,
        intermediate=256, context=64, tied=False,
    )  # fmt: skip


def quantised(grid: QuantizationGrid, spec: ModelSpec | None = None) -> QuantizedModel:
    model = random_model(spec or tiny(), ModelBuild("cpu", torch.bfloat16), seed=3).float()
    return round_model(model, grid, torch.bfloat16)


# Checkpoints that join matrices in one tensor, and that order the rows of a head for another rotation than ours.
ELSEWHERE = {
    "phi3": dict(rope=Rope(rotated=12)),
    "glm4": dict(rope=Rope(rotated=8), post_norms=True, qkv_bias=True),
}


@pytest.mark.parametrize("scheme", ["w4a16", "nvfp4", "fp8-block"])
@pytest.mark.parametrize("family", ELSEWHERE)
def test_rows_that_a_checkpoint_has_elsewhere_are_written_there(family, scheme, tmp_path: Path):
    spec = msgspec.structs.replace(tiny(), family=family, norm_eps=1e-5, **ELSEWHERE[family])
    made = quantised(GRIDS[scheme], spec)
    if (family, scheme) == ("phi3", "fp8-block"):  # q, k and v have 128, 32 and 32 rows
        with pytest.raises(UnsupportedModel, match=r"qkv_proj.* a scale for 128 rows: it joins"):
            write_compressed_tensors(made, tmp_path / "made")
        return
    write_compressed_tensors(made, tmp_path / "made")
    back = dict(open_checkpoint(tmp_path / "made").load("cpu", torch.float32).named_parameters())
    for name, value in made.model.named_parameters():
        torch.testing.assert_close(back[name], value, rtol=2**-8, atol=1e-6, msg=name)


def test_zero_points_are_written_even_where_all_are_in_the_middle():
    planes = rounded(
        torch.arange(-8.0, 8.0).repeat(4, 4), QuantizationGrid("int4", 32, symmetric=False)
    )
    assert torch.equal(dequantized(planes), torch.arange(-8.0, 8.0).repeat(4, 4))
    assert "weight_zero_point" in pack(planes, torch.bfloat16, symmetric=False)
    assert "weight_zero_point" not in pack(planes, torch.bfloat16, symmetric=True)


@pytest.mark.parametrize("name", GRIDS)
def test_transformers_reads_the_same_weights(name: str, tmp_path: Path):
    pytest.importorskip("compressed_tensors", reason="reads what we write; an extra of the tests")
    import transformers

    made = quantised(GRIDS[name])
    write_compressed_tensors(made, tmp_path / "made")
    four_bits = GRIDS[name].kind == "int4"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "made",
        dtype=torch.float32 if four_bits else torch.bfloat16,
    )
    ids_T = torch.arange(40) * 37 % 160
    with torch.inference_mode():
        logits_TV = theirs.eval()(ids_T[None]).logits[0]  # the first pass decompresses
    found = theirs.state_dict()
    assert len(made.planes) == 14
    for slot, planes in made.planes.items():  # they multiply level and scale in bfloat16
        value = found[source("llama", slot).tensor].float()
        torch.testing.assert_close(value, dequantized(planes), rtol=2**-8, atol=1e-7)
    if four_bits:
        attend = PackedDocuments([40])
        with torch.inference_mode():
            ours_TV = made.model.logits(made.model(ids_T, attend.positions_T(), attend))
        torch.testing.assert_close(logits_TV, ours_TV, atol=2e-4, rtol=1e-3)


def test_config_has_no_field_that_is_newer_than_0_17(tmp_path: Path):
    write_compressed_tensors(quantised(GRIDS["nvfp4"]), tmp_path / "made")
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert set(said) == {
        "quant_method",
        "format",
        "quantization_status",
        "config_groups",
        "ignore",
        "kv_cache_scheme",
    }
    weights = said["config_groups"]["group_0"]["weights"]
    assert set(weights) == {
        "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic",
    }  # fmt: skip


@given(st.sampled_from(sorted(GRIDS)), st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_no_level_is_nearer_than_the_one_chosen(name: str, rows: int, groups: int, seed: int):
    grid = GRIDS[name]
    w_NK = torch.randn(rows, 32 * groups, generator=torch.Generator().manual_seed(seed))
    planes = rounded(w_NK, grid, torch.bfloat16)
    error_NK = (dequantized(planes) - w_NK).abs()
    for step in (-1, 1):
        codes = planes.levels_NK.view(torch.uint8).int() + step
        top = 15 if planes.levels_NK.dtype == torch.uint8 else 255
        other = codes.clamp(0, top).to(torch.uint8).view(planes.levels_NK.dtype)
        moved = dequantized(type(planes)(**{**vars(planes), "levels_NK": other}))
        nearer = (moved - w_NK).abs() < error_NK - 1e-6 - 1e-5 * w_NK.abs()
        finite = moved.isfinite() & (codes == codes.clamp(0, top))
        if grid.kind == "int8":  # -128 is left out, so that levels are symmetric
            finite &= other != -128
        assert not (nearer & finite).any()


@pytest.mark.parametrize("name", GRIDS)
def test_rounding_twice_changes_nothing(name: str):
    grid = GRIDS[name]
    w_NK = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    once = rounded(w_NK, grid, torch.bfloat16)
    steps_same = nearest_levels(
        dequantized(once),
        once.scales.repeat_interleave(once.block_rows, 0)[:40].repeat_interleave(once.group, 1)[
            :, :96
        ],
        None if once.shifts is None else once.shifts.repeat_interleave(once.group, 1)[:, :96],
        grid,
    )
    torch.testing.assert_close(steps_same.float(), once.levels_NK.float())


def test_parts_of_a_joined_matrix_are_those_of_the_whole():
    planes = rounded(torch.randn(12, 64), SCHEMES["nvfp4"], torch.bfloat16)
    first, second = split_rows(planes, [8, 4])
    assert torch.equal(torch.cat([dequantized(first), dequantized(second)]), dequantized(planes))
    # One float32 scale for both, as vLLM wants for maps that it joins.
    assert torch.equal(
        pack(first, torch.bfloat16)["weight_global_scale"],
        pack(second, torch.bfloat16)["weight_global_scale"],
    )


def test_gguf_blocks_are_those_of_the_gguf_package():
    import gguf
    import numpy as np

    from cairn.models.gguf.write import blocks

    w_NK = torch.randn(6, 96, generator=torch.Generator().manual_seed(5))
    for scheme, kind in (
        ("q8_0", gguf.GGMLQuantizationType.Q8_0),
        ("q4_0", gguf.GGMLQuantizationType.Q4_0),
    ):
        planes = rounded(w_NK, SCHEMES[scheme], torch.float16)
        read = gguf.quants.dequantize(blocks(planes), kind)
        np.testing.assert_allclose(read, dequantized(planes).numpy(), rtol=1e-6, atol=1e-7)


def test_activations_are_rounded_by_token_and_by_group():
    x_MK = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    x_MK[0] *= 1000  # no token pays for another
    by_token = rounded_activations(x_MK, SCHEMES["w8a8"])
    step_M1 = x_MK.abs().amax(1, keepdim=True) / 127
    assert ((by_token - x_MK).abs() <= step_M1 / 2 + 1e-6).all()
    by_group = rounded_activations(x_MK, SCHEMES["fp8-block"])
    assert ((by_group - x_MK).abs() <= x_MK.abs() / 16 + step_M1 / 100).all()
    assert rounded_activations(x_MK, SCHEMES["w4a16"]) is x_MK
