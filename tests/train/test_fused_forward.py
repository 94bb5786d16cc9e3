"""The fused form of a model beside the plain one: hidden states, gradients, every kind of recomputation."""

import gc
import weakref

import msgspec
import pytest
import torch
from plain_model import PlainModel, named_gradients
from tiny_runs import recipe

from cairn.kernels.attention.attention_problem import WIDTHS
from cairn.models.presets import preset
from cairn.models.spec import Rope
from cairn.train import fused_forward
from cairn.train.config import Precision
from cairn.train.data.batch import make_batch
from cairn.train.fused_forward import Varlen
from cairn.train.objective import Objective
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.prepare import choose_form
from cairn.train.products import PLAIN, make_products

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
    "delta nets, gates of outputs": preset("tiny-qwen3-next"),
    "biases": msgspec.structs.replace(
        preset("tiny-qwen3"), qkv_bias=True, out_bias=True, mlp_bias=True
    ),
}


def batch_of(spec, lengths=(9, 14, 3)):
    tokens = torch.randint(spec.vocab, (sum(lengths),))
    return make_batch(tokens, tokens.roll(-1), list(lengths), [0])


def trained(spec, batch, loss, recompute="none", fused=True, products=PLAIN):
    attend = Varlen if fused and spec.head_dim in WIDTHS else None
    parallel = parallelize(
        spec,
        Mesh.alone(),
        seed=1,
        attend=attend,
        recompute=recompute,
        fused_context=32 if fused else None,
        products=products,
    )
    return named_gradients(parallel, [batch], loss, 7)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SPECS)
def test_gradients_are_those_of_the_plain_model(name, recompute):
    spec = SPECS[name]
    batch = batch_of(spec)
    expected, plain = named_gradients(PlainModel(spec, 1), [batch], None, 7)
    found, fused = trained(spec, batch, Objective(spec, fused=True), recompute)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert fused.keys() == plain.keys()
    for key, grad in plain.items():
        torch.testing.assert_close(fused[key], grad, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_recomputing_changes_nothing_in_the_plain_form(name, recompute):
    spec = SPECS[name]
    batch = batch_of(spec)
    expected, plain = trained(spec, batch, Objective(spec), fused=False)
    found, again = trained(spec, batch, Objective(spec), recompute, fused=False)
    assert torch.equal(found, expected)
    for key, grad in plain.items():
        torch.testing.assert_close(again[key], grad, rtol=1e-6, atol=1e-7)


def kept_bytes(run):
    """Bytes of all tensors that autograd keeps for backward, each storage once."""
    storages = {}

    def pack(tensor):
        # Alive: its address is not given again.
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in storages.values())


def test_recomputing_keeps_less():
    spec = SPECS["qwen3"]
    batch = batch_of(spec, (64,))

    def kept(kind):
        parallel = parallelize(spec, Mesh.alone(), recompute=kind, fused_context=64)
        (stage,) = parallel.stages
        return kept_bytes(lambda: stage(batch.tokens_T, batch.positions_T, Varlen(batch)))

    tokens, two_norms_and_activation = 64, 2 * spec.hidden + spec.intermediate
    assert kept("none") - kept("selective") == spec.layers * tokens * two_norms_and_activation * 4


def test_fp8_agrees_between_the_forms_and_is_near_the_truth():
    # Sizes of 16 and more: others stay in 16 bits.
    spec = msgspec.structs.replace(SPECS["qwen3"], intermediate=96)
    batch = batch_of(spec, (16, 32))
    loss = Objective(spec)
    truth, exact = named_gradients(PlainModel(spec, 1), [batch], None, 7)
    for kind in ("tensor", "row"):
        products = make_products(kind)
        fused, ours = trained(spec, batch, loss, "selective", products=products)
        plain, theirs = trained(spec, batch, loss, fused=False, products=products)
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
    spec, cpu, cuda = SPECS["qwen3"], torch.device("cpu"), torch.device("cuda")
    assert choose_form(recipe(), cpu, spec)[0] is False
    assert choose_form(recipe(), cuda, spec)[0] is True
    fused = recipe(precision=Precision(kernels="fused"))
    assert choose_form(fused, cpu, spec)[0] is True
    assert choose_form(recipe(), cuda, preset("tiny-qwen3-next"))[0] is False


def test_nothing_of_the_last_layer_but_its_norm_is_held_while_the_loss_is_computed(monkeypatch):
    """Beside the logits, each tensor [T, D] that somebody still refers to adds to the peak of memory."""
    added, alive = [], []
    make = fused_forward.TrainingResidual.__new__

    def noted(kind, x_TD, pending_TD=None):
        if pending_TD is not None:
            added.append(weakref.ref(pending_TD))
        return make(kind, x_TD, pending_TD)

    def loss(hidden_TD, vocabulary, batch, valid):
        gc.collect()
        alive.append(sum(one() is not None for one in added))
        return hidden_TD.sum()

    monkeypatch.setattr(fused_forward.TrainingResidual, "__new__", noted)
    spec = SPECS["qwen3"]
    trained(spec, batch_of(spec), loss, recompute="norms")
    assert len(added) == 2 * spec.layers
    assert alive == [0]
