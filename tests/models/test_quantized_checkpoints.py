"""Checkpoints that compressed-tensors wrote, read here: its weights bit by bit, and transformers' logits.

`quantized_checkpoints/make.py` wrote them and what is expected of them.
"""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.maps import linears
from cairn.models.quantized.planes import Planes
from cairn.models.quantized.source import QuantizedTensors

FOLDER = Path(__file__).parent.parent / "quantized_checkpoints"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]


def logits_of(model) -> torch.Tensor:
    attend = PackedDocuments([len(TOKENS)])
    with torch.no_grad():
        return model.logits(model(torch.tensor(TOKENS), attend.positions_T(), attend))


def digest(weight: torch.Tensor) -> str:
    return hashlib.blake2b(weight.float().contiguous().numpy().tobytes(), digest_size=8).hexdigest()


def test_every_scheme_of_compressed_tensors_is_here():
    assert len(NAMES) == 11


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_compressed_tensors_to_the_bit(name):
    tensors = open_checkpoint(FOLDER / name).tensors
    assert isinstance(tensors, QuantizedTensors)
    tensors.float_dtype = torch.float32
    expected = json.loads((FOLDER / name / "expected.json").read_text())["weights"]
    assert {key: digest(tensors.tensor(key)) for key in expected} == expected


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_transformers(name, fused):
    checkpoint = open_checkpoint(FOLDER / name)
    checkpoint.tensors.float_dtype = torch.float32
    expected = json.loads((FOLDER / name / "expected.json").read_text())["logits"]
    notes: list[str] = []
    packed = checkpoint.load("cpu", torch.float32, fused=fused, notes=notes)
    assert notes == []
    assert sum(part.form is not None for part in linears(packed)) == (3 if name == "mixed" else 4)
    for model in (packed, checkpoint.load("cpu", torch.float32, fused=fused)):
        torch.testing.assert_close(logits_of(model), torch.tensor(expected), atol=2e-4, rtol=0)


def test_activations_and_cache_scales_are_read():
    def of(name: str) -> Planes:
        tensors = open_checkpoint(FOLDER / name).tensors
        return tensors.planes("model.layers.0.self_attn.q_proj.weight", "cpu")

    assert of("w4a16").activations == "float"
    assert of("fp8-dynamic").activations == of("w8a8").activations == "token"
    assert of("fp8-block").activations == "group"
    static = of("fp8-static")
    assert (static.activations, static.block_rows) == ("tensor", 64)
    assert static.input_scale == pytest.approx(0.05, rel=1e-2)
    ((keys, values),) = open_checkpoint(FOLDER / "fp8-dynamic").cache_scales() or []
    assert (round(keys, 3), round(values, 3)) == (0.02, 0.03)
    assert open_checkpoint(FOLDER / "w4a16").cache_scales() is None
