"""Quantised checkpoints on a GPU: each product is that of its planes, and the logits are those of such products.

A kernel that takes float8 rounds activations, and its oracle rounds them in the same places: `Simulated` multiplies in
float32 what the rounded numbers stand for. Rounding alone moves the logits of these small models by 7%.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cairn.kernels.quantize.quantize import dequantize_reference, quantize_reference
from cairn.models.attend import PackedDocuments
from cairn.models.checkpoint import open_checkpoint
from cairn.models.linear.form import PLAIN, Epilogue, Fp8Form, LinearForm, finished
from cairn.models.linear.maps import linears
from cairn.models.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FOLDER = Path(__file__).parent.parent / "quantized_checkpoints"
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
TOKENS = [3, 17, 29, 5, 11, 23, 2, 31]
OF_ONE_PRODUCT = 0.005  # relative; bfloat16 rounds by up to 0.004


class Simulated:
    """What a form of float8 rows stands for: activations rounded by token, the product in float32."""

    def __init__(self, form: LinearForm) -> None:
        self.form, self.nbytes = form, form.nbytes

    def covers(self, rows: int) -> bool:
        return True

    def after(self, weight_K: Tensor) -> None:
        return None

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        rounded_MK = dequantize_reference(quantize_reference(x_MK), torch.float32)
        y_MN = rounded_MK @ dequantize_reference(self.form.quantized, torch.float32).T
        return finished(y_MN.to(x_MK.dtype), bias_N, epilogue)


class Compared(Simulated):
    """The form's own product, and how far it is from the simulated one of the same input."""

    error = 0.0

    def product(
        self, x_MK: Tensor, bias_N: Tensor | None = None, epilogue: Epilogue = PLAIN
    ) -> Tensor:
        found = self.form.product(x_MK, bias_N, epilogue)
        self.error = relative(found, super().product(x_MK, bias_N, epilogue))
        return found


def relative(found: Tensor, expected: Tensor) -> float:
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def logits_of(model: Transformer) -> Tensor:
    attend = PackedDocuments([len(TOKENS)], device="cuda")
    tokens_T = torch.tensor(TOKENS, device="cuda")
    with torch.no_grad():
        return model.logits(model(tokens_T, attend.positions_T(), attend)).float().cpu()


@pytest.mark.parametrize("name", NAMES)
def test_planes_on_a_gpu_have_transformers_logits(name):
    expected = torch.tensor(json.loads((FOLDER / name / "expected.json").read_text())["logits"])
    model = open_checkpoint(FOLDER / name).load("cuda", torch.bfloat16, notes=[])
    assert sum(part.form is not None for part in linears(model)) >= 3
    rounding = [part for part in linears(model) if isinstance(part.form, Fp8Form)]
    assert bool(rounding) == (name.startswith("fp8") or name == "mixed")
    compared = [Compared(part.form) for part in rounding]
    for part, form in zip(rounding, compared, strict=True):
        part.take(form)
    error = relative(logits_of(model), expected)
    for part, form in zip(rounding, compared, strict=True):
        part.take(Simulated(form.form))
    of_rounding = relative(logits_of(model), expected)
    print(f"{name}: {error:.4f}, simulated {of_rounding:.4f}, {[one.error for one in compared]}")
    assert all(one.error < OF_ONE_PRODUCT for one in compared)
    assert error < (1.25 * of_rounding if rounding else 0.02)
