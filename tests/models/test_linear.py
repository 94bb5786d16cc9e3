"""Linear maps own the form of their weights: a new form is a class and a line in the registry, an adapter an addend."""

import ast
from pathlib import Path

import pytest
import tiny_checkpoints
import torch

import cairn
from cairn.core.errors import ConfigError
from cairn.kernels.quantize.quantize import dequantize_reference
from cairn.models.activation import Gate
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.fused import Fused
from cairn.models.lean import Lean
from cairn.models.linear.convert import convert_weights
from cairn.models.linear.form import PLAIN, Epilogue, Kernels
from cairn.models.linear.fp8_rows import Fp8Rows
from cairn.models.linear.maps import ColumnParallelLinear, RowParallelLinear, held_bytes, linears
from cairn.models.linear.transposed import TransposedForm
from cairn.models.presets import preset
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model


def columns(fused: bool = True, bias: bool = True) -> ColumnParallelLinear:
    part = ColumnParallelLinear(ModelBuild("cpu", fused=fused), 32, {"gate": 24, "up": 24}, bias)
    for parameter in part.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return part.requires_grad_(False)


def tiny(family: str = "qwen3") -> Transformer:
    model = open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)
    return model.requires_grad_(False)


def test_sizes_are_compared_with_the_first_and_the_last_alone():
    """While torch records a step, sizes are tensors: a comparison with every number took 28 ms for each product."""
    compared = []

    class Size(int):
        def __eq__(self, other):
            compared.append(other)
            return int(self) == other

        __hash__ = int.__hash__

    form = TransposedForm(torch.randn(4, 8))
    assert [rows for rows in range(300) if form.covers(Size(rows))] == [*range(2, 193)]
    assert compared == []


@pytest.mark.parametrize("rows", [1, 5, 200])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("gate", [None, Gate("silu", True)])
@pytest.mark.parametrize("form", [None, TransposedForm, Fp8Rows])
def test_every_form_is_the_float64_product_of_what_it_stands_for(form, gate, fused, rows):
    part, x_MK = columns(fused), torch.randn(rows, 32)
    weight, bias = part.joined(), torch.cat([owner.bias for owner in part.owners()])
    if form is not None:
        part.take(form(part.joined()))
    if isinstance(part.form, Fp8Rows):
        weight = dequantize_reference(part.form.quantized, torch.float64)
        assert not torch.equal(weight.float(), part.joined())
        assert part.form.nbytes == weight.numel() + 4 * len(weight)
    expected = x_MK.double() @ weight.double().T + bias.double()
    expected = expected if gate is None else gate.plain(expected)
    found = part.product(x_MK, PLAIN if gate is None else Epilogue(gate))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [None, Fp8Rows])
@pytest.mark.parametrize("kernels", [None, Kernels()])
def test_an_adapter_adds_to_the_product_before_its_activation(kernels, form):
    """The one place where an adapter hangs, whatever the form and whoever multiplies."""
    part, x_MK = columns(), torch.randn(7, 32)
    if form is not None:
        part.take(form(part.joined()))
    gate = Gate("silu", True)
    bare = part.product(x_MK)
    delta_NK = torch.randn(48, 32)
    part.addend = lambda x: x @ delta_NK.T
    found = part.product(x_MK, Epilogue(gate, kernels=kernels))
    torch.testing.assert_close(found, gate.plain(bare + x_MK @ delta_NK.T), rtol=1e-4, atol=1e-4)
    assert torch.equal(torch.cat(part(x_MK), -1), part.product(x_MK))


@torch.inference_mode()
def test_every_form_of_the_model_asks_the_adapter():
    model, delta = tiny(), torch.full((1,), 0.05)
    for part in linears(model):
        if isinstance(part, RowParallelLinear):
            part.addend = lambda x, n=part.shape[0]: (delta * x.sum(-1, keepdim=True)).expand(-1, n)
    attend = PackedDocuments([9])
    tokens, positions = torch.arange(9), attend.positions_T()
    found = model(tokens, positions, attend)
    for part in linears(model):
        if isinstance(part, RowParallelLinear):  # the same as a change of the weights
            part.addend = None
            part.weight.data += delta
    torch.testing.assert_close(found, model(tokens, positions, attend), rtol=1e-4, atol=1e-4)


def test_a_model_in_fp8_is_near_and_smaller():
    model = tiny()
    attend = PackedDocuments([15])
    tokens, positions = torch.arange(1, 16), attend.positions_T()
    with torch.inference_mode():
        exact = model.logits(model(tokens, positions, attend))
        before = sum(part.read_bytes() for part in linears(model))
        said = convert_weights(model, "fp8", release=True)
        near = model.logits(model(tokens, positions, attend))
        lean = Lean(model)
    assert "float8" in said
    assert sum(part.read_bytes() for part in linears(model)) < before
    assert not torch.equal(near, exact)
    assert (near - exact).norm() < 0.1 * exact.norm()
    assert all(p.form is not None for p in lean.products)
    held = [p for p in model.layers.parameters() if p.dim() == 2]
    assert all(p.is_meta for p in held)  # what was replaced is not kept


@pytest.mark.parametrize(("form", "error"), [("fp8", 0.1), ("mxfp4", 0.5)])
def test_experts_in_another_form_are_near_and_smaller(form, error):
    model = random_model(preset("tiny-moe"), ModelBuild("cpu"))
    attend = PackedDocuments([15])
    tokens, positions = torch.arange(1, 16), attend.positions_T()
    with torch.inference_mode():
        exact, before = model(tokens, positions, attend), held_bytes(model)
        said = convert_weights(model, form, release=True)
        near = model(tokens, positions, attend)
    assert f"experts of {model.spec.layers} layers" in said
    assert held_bytes(model) < before
    assert 0 < (near - exact).norm() < error * exact.norm()


def test_mxfp4_is_a_form_of_experts_alone():
    with pytest.raises(ConfigError, match="no experts"):
        convert_weights(tiny(), "mxfp4")


def test_products_in_another_form_do_not_share_the_chip():
    """Two halves of a step want kernels that leave room: those exist for floating point only."""
    model = random_model(preset("tiny-qwen3"), ModelBuild("cpu", fused=True))
    assert Fused(model, 32).small(8)
    convert_weights(model, "fp8")
    assert not Fused(model, 32).small(8)


MULTIPLIES = {"linear", "matmul", "mm", "addmm", "addmm_"}
ALLOWED = (
    "models/linear/",  # the forms
    "models/experts.py",  # the router, which is part of a mixture
    "models/vision/tower.py",  # patches, whose weight is a convolution's
    "models/latent.py",  # the map from latents to keys and values, which is multiplied from either side
    "kernels/",
    "labs/",
    "train/parallel/pipeline/deferred.py",
)


def test_nobody_else_reads_a_weight_to_multiply():
    root = Path(cairn.__file__).parent
    found = []
    for path in root.rglob("*.py"):
        place, text = path.relative_to(root).as_posix(), path.read_text()
        if ".weight" in text and not place.startswith(ALLOWED):  # to parse the others takes seconds
            found += [f"{place}:{line}" for line in multiplications(ast.parse(text))]
    assert not found


def multiplications(tree: ast.AST) -> list[int]:
    """Lines of products of which an operand is an attribute `weight`."""
    lines = []
    for node in ast.walk(tree):
        operands: list[ast.AST] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            operands = [node.left, node.right]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operands = list(node.args) if node.func.attr in MULTIPLIES else []
        inside = (each for operand in operands for each in ast.walk(operand))
        if any(isinstance(each, ast.Attribute) and each.attr == "weight" for each in inside):
            lines.append(node.lineno)
    return lines


def test_the_search_for_multiplications_finds_them():
    text = "y = F.linear(x, part.weight)\nz = x @ part.weight.T\nn = norm(x, part.weight)\n"
    assert multiplications(ast.parse(text)) == [1, 2]
