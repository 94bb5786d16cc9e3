"""Quantised checkpoints on a GPU: packed or dequantised, the logits are those of the dequantised weights."""

import json
from pathlib import Path

import pytest
import torch

from cairn.models.attend import Packed
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.maps import linears

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(__file__).parent.parent / "quantized_checkpoints"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]


@pytest.mark.parametrize("name", NAMES)
def test_planes_on_a_gpu_have_transformers_logits(name):
    """Products in bfloat16, and activations that a kernel rounds to 8 bits: within their rounding."""
    expected = torch.tensor(json.loads((FOLDER / name / "expected.json").read_text())["logits"])
    notes: list[str] = []
    model = open_checkpoint(FOLDER / name).load("cuda", torch.bfloat16, notes=notes)
    assert sum(part.form is not None for part in linears(model)) >= 3
    attend = Packed([len(TOKENS)], device="cuda")
    with torch.no_grad():
        tokens_T = torch.tensor(TOKENS, device="cuda")
        logits = model.logits(model(tokens_T, attend.positions_T(), attend)).float().cpu()
    scale = expected.abs().max()
    error = ((logits - expected).norm() / expected.norm()).item()
    print(f"{name}: relative error {error:.4f} of logits up to {scale:.1f}; {notes}")
    assert error < 0.05
