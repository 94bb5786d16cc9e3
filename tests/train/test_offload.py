"""Activation offloading against the same step without it: gradients are equal bit by bit, and memory is given back."""

import gc

import msgspec
import pytest
import torch
from plain_model import named_gradients

from cairn.core.errors import HardwareError
from cairn.models.adapter.spec import AdapterSpec
from cairn.models.presets import preset
from cairn.train import offload
from cairn.train.data.batch import make_batch
from cairn.train.fused_forward import Varlen
from cairn.train.objective import Objective
from cairn.train.offload import HostMemory, Offload, Plan, spread
from cairn.train.parallel.mesh import Mesh
from cairn.train.parallel.parallelize import parallelize
from cairn.train.trainable import Trainable

ADAPTER = {"adapter": AdapterSpec(rank=4, alpha=8.0), "trainable": Trainable(only=("*.adapter.*",))}
SPECS = {
    name: msgspec.structs.replace(preset(name), head_dim=64)
    for name in ("tiny-qwen3", "tiny-llama")
}


@pytest.fixture(autouse=True)
def _everything_is_large(monkeypatch):
    monkeypatch.setattr(offload, "SMALL", 0)


def batch_of(spec, lengths):
    tokens = torch.randint(spec.vocab, (sum(lengths),), generator=torch.Generator().manual_seed(3))
    return make_batch(tokens, tokens.roll(-1), list(lengths), [0])


def gradients(spec, moved, fused=True, recompute="none", **more):
    """Of two microbatches, which use the same memory of the host; and the stage that they ran through."""
    parallel = parallelize(
        spec,
        Mesh.alone(),
        seed=1,
        attend=Varlen if fused else None,
        recompute=recompute,
        fused_context=32 if fused else None,
        offload=Plan(moved, 1e9),
        **more,
    )
    for name, parameter in parallel.stages[0].named_parameters():
        if ".adapter." in name:  # B begins with 0, and then A has no gradient
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(5))
    batches = [batch_of(spec, (9, 14, 3)), batch_of(spec, (5, 21))]
    found = named_gradients(parallel, batches, Objective(spec, fused=fused), 7)
    return *found, parallel.stages[0]


def check(spec, moved, recompute="none", **more):
    loss, expected, _ = gradients(spec, 0, recompute=recompute, **more)
    found, again, stage = gradients(spec, moved, recompute=recompute, **more)
    assert torch.equal(found, loss)
    assert again.keys() == expected.keys()
    assert all(gradient.any() for gradient in again.values())
    for name, gradient in expected.items():
        assert torch.equal(again[name], gradient), name
    return stage.offload


@pytest.mark.parametrize(
    ("name", "more", "fused", "moved"),
    [
        ("tiny-qwen3", {}, True, 1),
        ("tiny-qwen3", ADAPTER, False, 2),
        ("tiny-llama", {}, False, 2),
        ("tiny-llama", ADAPTER, True, 1),
    ],
    ids=["full-fused", "adapter-plain", "full-plain", "adapter-fused"],
)
def test_gradients_do_not_change(name, more, fused, moved):
    memory = check(SPECS[name], moved, fused=fused, **more).memory
    gc.collect()
    assert memory.slabs  # something went there
    assert memory.holders == memory.used == 0  # and nothing is left


@pytest.mark.parametrize("more", [{}, ADAPTER], ids=["full", "adapter"])
def test_with_outputs_of_norms_and_activations_computed_again(more):
    spec = SPECS["tiny-qwen3"]
    check(spec, 2, recompute="selective", **more)
    _, expected, _ = gradients(spec, 0, **more)
    _, found, _ = gradients(spec, 2, recompute="selective", **more)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_tensor_is_moved_once_and_parameters_stay():
    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 8))

        def forward(self, x):
            y = x @ self.weight.t()  # saves x and a view of the parameter
            return (y.sin() + y.view(4, 16).cos().view(8, 8) + y[:4].exp().sum(),)

    x, layer = torch.randn(8, 8, requires_grad=True), Square()
    moving = Offload("cpu", [0], HostMemory(pinned=False, most=1e9, slab=96))
    (out,) = moving.run(layer, lambda: layer(x))
    # x, y, and what exp keeps: its result. y is saved by three operations.
    assert moving.memory.used == x.nbytes + 8 * 8 * 4 + 4 * 8 * 4
    moving.begin()  # nothing is left where it was computed
    found = torch.autograd.grad(out.sum(), [x, layer.weight])
    for a, b in zip(found, torch.autograd.grad(layer(x)[0].sum(), [x, layer.weight]), strict=True):
        assert torch.equal(a, b)


def test_a_pass_without_gradients_moves_nothing():
    moving = Offload("cpu", [0], HostMemory(pinned=False, most=1e9))
    with torch.no_grad():
        moving.run(torch.nn.Identity(), lambda: (torch.randn(8),))
    assert not moving.memory.slabs


@pytest.mark.parametrize(("layers", "moved"), [(80, 41), (64, 1), (7, 7), (7, 3)])
def test_moved_layers_are_spread(layers, moved):
    found = sorted(spread(layers, moved))
    assert len(found) == moved
    gaps = [b - a for a, b in zip(found, [*found[1:], layers], strict=True)]
    assert max(gaps) - min(gaps) <= 1
    assert moved == layers or layers - 1 not in found


def test_the_memory_of_the_host_is_bounded():
    memory = HostMemory(pinned=False, most=100, slab=64)
    assert [len(part) for part in memory.take(40)] == [40]
    with pytest.raises(HardwareError, match="need more than 64 B, and 100 B"):
        memory.take(40)


def test_it_keeps_less_on_the_device():
    """With adapters, too, what norms and activations give is forgotten: `selective` says what it does."""
    spec, kept = SPECS["tiny-qwen3"], {}
    for kind in ("none", "selective"):
        kept[kind] = 0

        def pack(tensor, kind=kind):
            kept[kind] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            gradients(spec, 0, recompute=kind, **ADAPTER)
    tokens, columns = 26 + 26, 2 * spec.hidden + spec.intermediate
    assert kept["none"] - kept["selective"] == spec.layers * tokens * columns * 4
