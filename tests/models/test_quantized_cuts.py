"""Planes cut between ranks and joined side by side stand for the same numbers as the matrices themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_files import CASES
from test_quantized_formats import Tensors, llama, logits_of, quantised, write

from cairn.core.errors import ConfigError
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.form import Epilogue
from cairn.models.linear.fp8_planes import Fp8Blocks, Fp8Planes
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear
from cairn.models.linear.planes_form import PlanesForm, SideBySide
from cairn.models.quantized.planes import Planes, dequantized
from cairn.models.quantized.scheme import quantization_of
from cairn.models.quantized.sharding import by_row, cut_columns, cut_rows, joined
from cairn.models.quantized.source import QuantizedTensors
from cairn.models.weights import load_model


@st.composite
def planes(draw, columns: int = 96, kind: str = "") -> Planes:
    kind = kind or draw(st.sampled_from(["int4", "int8", "fp8", "mxfp4"]))
    rows = draw(st.sampled_from([8, 24, 40]))
    group, block_rows = draw(st.sampled_from([16, 32, 96])), draw(st.sampled_from([1, 8, rows]))
    chance = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    levels = torch.randint(0, 16, (rows, columns), generator=chance, dtype=torch.uint8)
    if kind in ("int8", "fp8"):
        levels = levels.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
    shape = (-(-rows // block_rows), -(-columns // group))
    scales = torch.rand(shape, generator=chance) + 0.1
    shifts = torch.rand(shape, generator=chance) if draw(st.booleans()) else None
    return Planes(kind, levels, scales, shifts, group, block_rows)


@settings(max_examples=60, deadline=None)
@given(made=planes(), start=st.integers(0, 7), size=st.integers(1, 8))
def test_rows_are_cut_anywhere(made, start, size):
    stop = min(start + size, made.shape[0])
    assert torch.equal(dequantized(cut_rows(made, start, stop)), dequantized(made)[start:stop])


@settings(max_examples=60, deadline=None)
@given(made=planes(), ranks=st.sampled_from([1, 2, 3, 6]))
def test_columns_are_cut_where_groups_end(made, ranks):
    share = made.shape[1] // ranks
    for rank in range(ranks):
        ends = share * rank, share * (rank + 1)
        if made.group < made.shape[1] and share % made.group:
            with pytest.raises(ConfigError, match=f"groups of {made.group} share a scale"):
                cut_columns(made, *ends)
            return
        cut = cut_columns(made, *ends)
        assert torch.equal(dequantized(cut), dequantized(made)[:, slice(*ends)])


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(planes(kind="int4") | planes(kind="fp8"), min_size=1, max_size=3))
def test_joined_planes_are_the_matrices_one_under_another(parts):
    whole = joined(parts)
    if len({part.kind for part in parts}) > 1:
        assert whole is None
    else:
        expected = torch.cat([dequantized(part) for part in parts])
        torch.testing.assert_close(dequantized(whole), expected, rtol=0, atol=0)


def test_blocks_of_float8_multiply_as_what_they_stand_for():
    levels = torch.randn(144, 512).to(torch.float8_e4m3fn)
    planes = Planes("fp8", levels, torch.rand(2, 4), None, 128, 128)
    x = torch.randn(3, 512)
    assert Fp8Blocks.obstacle(planes) is None
    expected = x @ dequantized(planes).T
    torch.testing.assert_close(Fp8Blocks(planes).product(x), expected)
    assert "a scale for each 128" in (Fp8Planes.obstacle(planes) or "")
    assert "blocks of 1 x 128" in (Fp8Blocks.obstacle(by_row(planes)) or "")


def test_forms_side_by_side_multiply_as_one():
    chance = np.random.default_rng(0)
    parts = [CASES[case].write(chance, 32, 64) for case in ("gptq-order", "awq")]
    forms = []
    for case, made in zip(("gptq-order", "awq"), parts, strict=True):
        files = Tensors({f"m.{part}": tensor for part, tensor in made.tensors.items()})
        quantization = quantization_of({"quantization_config": CASES[case].config})
        assert quantization is not None
        source = QuantizedTensors(files, quantization, torch.float32)
        forms.append(PlanesForm(source.planes("m.weight", "cpu")))
    x_MK, bias_N = torch.randn(5, 64), torch.randn(64)
    y_MN = SideBySide(forms).product(x_MK, bias_N, Epilogue())
    weight_NK = torch.cat([made.weight for made in parts])
    torch.testing.assert_close(y_MN, x_MK @ weight_NK.T + bias_N)
    assert SideBySide(forms).nbytes == sum(form.nbytes for form in forms)


class Place:
    """One rank of several that nobody joins: its share is looked at."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def enter(self, x):
        return x

    reduce = gather = whole = enter


@pytest.mark.parametrize("case", ["gptq-order", "modelopt-fp8", "packed-order"])
def test_each_rank_has_its_share_of_the_planes(tmp_path, case):
    checkpoint, _ = quantised(tmp_path, case)
    whole = checkpoint.load("cpu", torch.float32)
    for rank in range(2):
        notes: list[str] = []
        build = ModelBuild("cpu", torch.float32, Place(rank, 2), fused=True)
        model = load_model(checkpoint.spec, checkpoint.tensors, build, notes=notes)
        for path, part in model.named_modules():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                slots = [slot for slot in part.slots() if slot.name.endswith("weight")]
                weights = [whole.get_parameter(f"{path}.{slot.name}") for slot in slots]
                shares = [slot.share(w) for slot, w in zip(slots, weights, strict=True)]
                y_KN = part._multiply(torch.eye(part.shape_NK()[1]), Epilogue())
                assert torch.equal(y_KN.T, torch.cat(shares))
        # Columns that are split and have an order of their own are dequantised, and that is said.
        split = [model.layers[0].attention.out, model.layers[0].feed_forward.down]
        assert all((part.form is None) == ("order" in case) for part in split)
        assert len(notes) == ("order" in case)


@pytest.mark.parametrize("case", ["gptq", "awq"])
def test_ranks_that_cut_a_group_are_refused_from_headers(tmp_path, case):
    checkpoint, _ = quantised(tmp_path, case)
    build = ModelBuild("cpu", torch.float32, Place(1, 2), fused=True)
    with pytest.raises(ConfigError) as error:
        load_model(checkpoint.spec, checkpoint.tensors, build, notes=[])
    assert error.value.message == (
        "tensor parallel 2 cuts the 96 columns of model.layers.0.mlp.down_proj.weight into 48, and groups of 32 "
        "share a scale"
    )
    assert error.value.hint == "use tensor parallel 1, or a checkpoint with groups of 16"


def test_a_map_of_quantised_and_float_matrices_serves_both(tmp_path: Path):
    """v stays in floating point between two quantised ones of different bits."""
    chance, model, stored = np.random.default_rng(0), llama(), {}
    for name, bits in (("q_proj", 4), ("k_proj", 8)):
        at = f"model.layers.0.self_attn.{name}"
        module = model.get_submodule(at)
        made = CASES["gptq" if bits == 4 else "gptq-8-bits"].write(chance, *module.weight.shape)
        module.weight.data = made.weight
        stored |= {f"{at}.{part}": tensor for part, tensor in made.tensors.items()}
    config = CASES["gptq"].config | {"dynamic": {".*k_proj": {"bits": 8}}}
    write(tmp_path, model, config, stored)
    loaded = open_checkpoint(tmp_path).load("cpu", torch.float32, fused=True, notes=[])
    assert isinstance(loaded.layers[0].attention.qkv.form, SideBySide)
    with torch.no_grad():
        expected = model(torch.tensor([[3, 17, 29, 5, 11, 23, 2, 31]])).logits[0]
    torch.testing.assert_close(logits_of(loaded), expected, atol=2e-4, rtol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["bits"] == 4
