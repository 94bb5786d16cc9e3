"""The fused form of a model beside the plain one: hidden states, gradients, every kind of recomputation."""

import msgspec
import pytest
import torch
from tiny_runs import recipe

from cairn.models.build import Build
from cairn.models.linear.maps import linears
from cairn.models.presets import preset
from cairn.models.spec import Rope
from cairn.models.weights import random_model
from cairn.train.config import Precision
from cairn.train.data.batch import make_batch
from cairn.train.fused_forward import FusedTraining, Varlen
from cairn.train.loss import NextToken
from cairn.train.parallel.alone import Alone
from cairn.train.prepare import choose_form
from cairn.train.products import PLAIN, make_products, through_products
from cairn.train.recompute import recomputing

WIDE = dict(
    hidden=64, heads=2, kv_heads=1, head_dim=64, layers=2
)  # a head size that our kernels know
SPECS = {
    "qwen3": msgspec.structs.replace(preset("tiny-qwen3"), **WIDE),
    "llama": msgspec.structs.replace(preset("tiny-llama"), **WIDE),
    "small heads": preset("tiny-qwen3"),
    "gemma3": preset("tiny-gemma3"),
    "moe": preset("tiny-moe"),
    # Parts without a kernel run by torch inside the fused form.
    "learned positions, LayerNorm, no gate": preset("tiny-gpt2"),
    "dynamic angles, relu gate": msgspec.structs.replace(
        preset("tiny-llama"),
        activation="relu",
        rope=Rope(kind="dynamic", factor=2.0, original_context=8),
    ),
    "biases": msgspec.structs.replace(
        preset("tiny-qwen3"), qkv_bias=True, out_bias=True, mlp_bias=True
    ),
}


def batch_of(spec, lengths=(9, 14, 3)):
    tokens = torch.randint(spec.vocab, (sum(lengths),))
    return make_batch(tokens, tokens.roll(-1), list(lengths), [0])


def gradients(parallel, batch, loss):
    value = parallel.forward_backward([batch], loss, torch.tensor(7.0))
    found = {name: grad.clone() for name, grad in parallel.gradients().items()}
    parallel.zero_grad()
    return value, found


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_plain_form(name, recompute):
    spec = SPECS[name]
    model = random_model(spec, Build("cpu", fused=True), seed=1)
    batch = batch_of(spec)
    expected, plain = gradients(Alone(model), batch, NextToken(spec))
    form = FusedTraining(model, 32, PLAIN, recompute)
    found, fused = gradients(Alone(model, form, form.attend), batch, NextToken(spec, fused=True))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert fused.keys() == plain.keys() == dict(model.named_parameters()).keys()
    for key, grad in plain.items():
        torch.testing.assert_close(fused[key], grad, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_recomputing_changes_nothing_in_the_plain_form(name, recompute):
    spec = SPECS[name]
    model = random_model(spec, Build("cpu"), seed=1)
    batch = batch_of(spec)
    expected, plain = gradients(Alone(model), batch, NextToken(spec))
    found, again = gradients(Alone(model, recomputing(model, recompute)), batch, NextToken(spec))
    assert torch.equal(found, expected)
    for key, grad in plain.items():
        torch.testing.assert_close(again[key], grad, rtol=1e-6, atol=1e-7)


def kept_bytes(run):
    """Bytes of all tensors that autograd keeps for backward, each storage once."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = (
            tensor  # alive: its address is not given again
        )
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_recomputing_keeps_less():
    spec = SPECS["qwen3"]
    model = random_model(spec, Build("cpu", fused=True))
    batch = batch_of(spec, (64,))

    def run(form, attend):
        return lambda: form(batch.tokens_T, batch.positions_T, attend(batch))

    forms = [FusedTraining(model, 64, PLAIN, kind) for kind in ("none", "selective")]
    none, selective = (kept_bytes(run(form, form.attend)) for form in forms)
    tokens, two_norms_and_activation = 64, 2 * spec.hidden + spec.intermediate
    assert none - selective == spec.layers * tokens * two_norms_and_activation * 4


def test_fp8_agrees_between_the_forms_and_is_near_the_truth():
    # Sizes of 16 and more: others stay in 16 bits.
    spec = msgspec.structs.replace(SPECS["qwen3"], intermediate=96)
    model = random_model(spec, Build("cpu", fused=True), seed=1)
    batch = batch_of(spec, (16, 32))
    loss = NextToken(spec)
    truth, exact = gradients(Alone(model), batch, loss)
    for kind in ("tensor", "row"):
        form = FusedTraining(model, 32, make_products(kind), "selective")
        fused, ours = gradients(Alone(model, form, form.attend), batch, loss)
        through_products(model, make_products(kind))
        plain, theirs = gradients(Alone(model), batch, loss)
        for module in linears(model):
            module.take(None)
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-4)
        assert not torch.equal(plain, truth)
        assert plain.item() == pytest.approx(truth.item(), rel=2e-2)
        for key, grad in exact.items():
            difference = (theirs[key] - grad).norm() / grad.norm()
            assert difference < 0.25, (kind, key)
            assert ((ours[key] - theirs[key]).norm() / grad.norm()) < 0.05, (kind, key)


def test_equal_lengths_take_the_dense_kernels():
    spec = SPECS["qwen3"]
    assert Varlen(batch_of(spec, (8, 8))).cu_seqlens is None
    assert Varlen(batch_of(spec, (8, 9))).cu_seqlens is not None


def test_the_device_decides_the_form_unless_the_recipe_does():
    assert choose_form(recipe(), torch.device("cpu"))[0] is False
    assert choose_form(recipe(), torch.device("cuda"))[0] is True
    fused = recipe(precision=Precision(kernels="fused"))
    assert choose_form(fused, torch.device("cpu"))[0] is True
