"""Weight-only products in the interpreter: exact on whole numbers in every published form, also where K is cut."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.cases.weight_only import FORMS, OTHERS, random_rows
from cairn.kernels.matmul import weight_only
from cairn.kernels.matmul.weight_only import (
    dequantize_rows,
    rows_reference,
    weight_only_matmul,
    weight_only_parts,
)

BF16 = torch.bfloat16


@pytest.mark.parametrize("form", [*FORMS, *OTHERS], ids=lambda form: form.name)
@pytest.mark.parametrize(("m", "n", "split"), [(1, 64, 1), (3, 80, 2)])
def test_a_product_is_exact(form, m, n, split, monkeypatch):
    """80 rows of w are one tile and a part of one."""
    monkeypatch.setattr(weight_only, "parts_of", lambda m, n, k: split)
    x, w = torch.randint(-1, 2, (m, 384)).to(BF16), random_rows(form, n, 384, "cpu", whole=True)
    bias = torch.randint(-4, 5, (n,)).to(BF16)
    exact = x.double() @ rows_reference(w).double().T
    parts = weight_only_parts(x, w)
    assert (parts is None) == (split == 1)
    assert parts is None or torch.equal(parts.double().sum(0), exact)
    found = weight_only_matmul(x, w, bias_N=bias, impl="triton")
    assert torch.equal(found, (exact + bias.double()).to(BF16))


@pytest.mark.parametrize("form", [*FORMS, *OTHERS], ids=lambda form: form.name)
def test_the_matrix_that_is_meant(form):
    w = random_rows(form, 80, 320 if form.kind == "fp8" else 256, "cpu")
    found = dequantize_rows(w, BF16, impl="triton")
    assert relative_error(found, rows_reference(w).double()) < 4e-3
