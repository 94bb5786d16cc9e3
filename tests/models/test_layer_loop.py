"""One loop for every form: which kernels it launches in which order, how many operations, and what it hands out."""

import msgspec
import pytest
import tiny_checkpoints
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.kernels.layer import activation as kernels_activation
from cairn.kernels.norm.join_norm import join_add_rmsnorm_reference
from cairn.kernels.norm.rmsnorm import add_rmsnorm_reference, rmsnorm_reference
from cairn.models import activation, fused
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.eagle import EagleHead, random_spec
from cairn.models.fused import Fused
from cairn.models.fused_head import FusedHead
from cairn.models.lean import Lean
from cairn.models.linear import gpu_product
from cairn.models.linear.convert import convert_drafter, convert_weights
from cairn.models.presets import preset
from cairn.models.spec import ModelSpec
from cairn.models.transformer import Transformer
from cairn.models.weights import random_model

QWEN = msgspec.structs.replace(
    preset("tiny-qwen3"), hidden=64, heads=2, kv_heads=1, head_dim=32, intermediate=96, layers=2
)


class Heads:
    """Stands in for pages: hands back the queries."""

    def projected(self, qkv_TE, heads, table, rule):
        launched.append("rope_write + attention")
        size = qkv_TE.shape[1] // (heads.q + 2 * heads.kv)
        return qkv_TE[:, : heads.q * size].unflatten(-1, (heads.q, size))

    def joined(self, qkv_TEC, heads, rule):
        return qkv_TEC[:, :heads].flatten(-2)

    def lengths_T(self):
        raise AssertionError("nobody asks")


launched: list[str] = []  # by the stand-ins below


def swiglu(y):
    gate, up = y.chunk(2, -1)
    return F.silu(gate) * up


@pytest.fixture
def kernels(monkeypatch):
    """Our GPU kernels replaced by their references, which note that they were launched."""
    launched.clear()

    def rmsnorm(x, w, eps, *, plus_one, prefetch):
        launched.append("rmsnorm")
        return rmsnorm_reference(x, w, eps, plus_one)

    def add_rmsnorm(x, residual, w, eps, *, plus_one, out, residual_out, prefetch):
        launched.append("add_rmsnorm" + " in place" * (out is x and residual_out is residual))
        y, total = add_rmsnorm_reference(x, residual, w, eps, plus_one)
        return out.copy_(y), residual_out.copy_(total)

    def join_add_rmsnorm(parts, residual, w, eps, *, plus_one, residual_out, prefetch):
        launched.append("join_add_rmsnorm" + " in place" * (residual_out is residual))
        y, total = join_add_rmsnorm_reference(parts, residual, w, eps, plus_one)
        return y, residual_out.copy_(total)

    def skinny_matmul(x, w, *, bias_N, activation, prefetch, shares_chip, ring):
        launched.append(f"skinny {activation or 'product'}{' beside' * shares_chip}")
        y = x @ w.T if bias_N is None else x @ w.T + bias_N
        return swiglu(y) if activation else y

    def skinny_parts(x, w, *, prefetch, shares_chip, ring):
        launched.append(f"skinny parts{' beside' * shares_chip}")
        return torch.stack((x @ w.T * 0.25, x @ w.T * 0.75))

    def matmul(x, w, *, bias_N, activation):
        launched.append(f"matmul {activation}")
        return swiglu(x @ w.T)

    def gated_activation(inner, up, name):
        launched.append("gated_activation")
        return activation.Gate(name, True).plain(inner)

    def launch(x, w, y, epilogue, tiles):
        launched.append("invariant product")
        y.copy_(x @ w.T)

    for module, stand_in in (
        (fused, rmsnorm),
        (fused, add_rmsnorm),
        (fused, join_add_rmsnorm),
        (gpu_product, skinny_matmul),
        (gpu_product, skinny_parts),
        (gpu_product, matmul),
        (gpu_product, launch),
        (kernels_activation, gated_activation),
    ):
        monkeypatch.setattr(module, stand_in.__name__, stand_in)


def model_of(spec: ModelSpec, is_fused: bool = True) -> Transformer:
    return random_model(spec, ModelBuild("cpu", fused=is_fused), seed=3).requires_grad_(False)


FEW = [
    "skinny product",
    "rope_write + attention",
    "skinny parts",
    "join_add_rmsnorm in place",
    "skinny swiglu",
    "skinny parts",
    "join_add_rmsnorm in place",
]
SOME = [
    "rope_write + attention",
    "add_rmsnorm in place",
    "gated_activation",
    "add_rmsnorm in place",
]
MANY = [
    "rope_write + attention",
    "rmsnorm",
    "matmul swiglu",
    "rmsnorm",
]  # products onto the residual
INVARIANT = ["invariant product", "rope_write + attention", "invariant product", "add_rmsnorm in place",
             "invariant product", "gated_activation", "invariant product", "add_rmsnorm in place"]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "layer"),
    [(1, FEW), (64, FEW), (300, SOME), (1100, MANY)],
    ids=["1", "64", "300", "1100"],
)
@torch.inference_mode()
def test_the_kernels_of_a_fused_step_in_their_order(kernels, rows, layer):
    """cuBLAS's products, of 300 and 1100 rows, are torch's and not noted."""
    Fused(model_of(QWEN), 2048)(torch.arange(rows) % 50, torch.arange(rows), Heads())
    assert launched == ["rmsnorm", *layer, *layer]


@torch.inference_mode()
def test_invariant_and_shared_steps_take_their_own_kernels(kernels):
    model, inputs = model_of(QWEN), (torch.arange(8), torch.arange(8), Heads())
    Fused(model, 32, invariant=True)(*inputs)
    assert launched == ["rmsnorm", *INVARIANT, *INVARIANT]
    launched.clear()
    Fused(model, 32).sharing_the_chip()(*inputs)
    products = [name for name in launched if name.startswith("skinny")]
    assert len(products) == 8
    assert all(name.endswith("beside") for name in products)


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_lean_step_has_no_more_operations_than_it_needs():
    """Per layer 2 norms of 4, 2 products that join their parts, 2 that do not, rotation, SwiGLU, 2 sums."""
    counts = []
    for layers in (1, 3):
        lean = Lean(model_of(msgspec.structs.replace(QWEN, layers=layers, qk_norm=False)))
        with Count() as count:
            lean(torch.arange(4), torch.arange(4), Heads())
        counts.append(count.operations)
    norm, product, rotation, gate, add = 4, 1, 5, 3, 1
    views = 3  # of the joined heads, and of the stand-in's queries
    assert (counts[1] - counts[0]) / 2 == 2 * norm + 4 * product + rotation + gate + 2 * add + views


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
@torch.inference_mode()
def test_layers_hand_out_their_hidden_states(family):
    """What the first n layers leave is what the model of n layers has before its last norm."""
    model = open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)
    attend, tokens = PackedDocuments([4, 3]), torch.arange(7)
    last = model.spec.layers - 1
    hidden, tapped = model.tapped(tokens, attend.positions_T(), attend, (0, last))
    assert torch.equal(model.norm(tapped[1]), hidden)
    assert torch.equal(hidden, model(tokens, attend.positions_T(), attend))
    assert not torch.equal(tapped[0], tapped[1])


@torch.inference_mode()
def test_every_form_hands_out_the_same_hidden_states(kernels):
    model, attend = model_of(QWEN), Heads()
    for rows in (8, 300, 1100):  # parts, a tensor, or nothing waits to be added
        inputs = (torch.arange(rows) % 50, torch.arange(rows), attend)
        hidden, tapped = Fused(model, 2048).tapped(*inputs, (0, 1))
        torch.testing.assert_close(model.norm(tapped[1]), hidden, rtol=1e-4, atol=1e-4)
        plain = Fused(model, 2048)(*inputs)
        assert torch.equal(hidden, plain)  # handing out changes nothing
        one_layer = model_of(msgspec.structs.replace(QWEN, layers=1))
        expected = Fused(one_layer, 2048)(*inputs)
        torch.testing.assert_close(one_layer.norm(tapped[0]), expected, rtol=1e-4, atol=1e-4)
    lean_hidden, lean_tapped = Lean(model).tapped(torch.arange(8), torch.arange(8), attend, (0, 1))
    torch.testing.assert_close(model.norm(lean_tapped[1]), lean_hidden, rtol=1e-4, atol=1e-4)


class Unturned(Heads):
    """The same for a plain form, whose queries are rotated by then: at place 0 that changes nothing."""

    def __call__(self, q_THC, k_TKC, v_TKC, rule):
        return q_THC


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("rows", [8, 300, 1100])
@torch.inference_mode()
def test_a_head_in_kernels_passes_as_the_plain_one(kernels, rows, before):
    spec = random_spec(QWEN)
    spec = msgspec.structs.replace(spec, taps=(0, 1, 1), norm_before_residual=before)
    head = EagleHead(spec, ModelBuild("cpu", fused=True), 2).requires_grad_(False)
    for parameter in head.parameters():
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(4))
    form, places = FusedHead(head, 32, rows), torch.zeros(rows, dtype=torch.int32)
    tapped = [torch.randn(rows, QWEN.hidden) for _ in spec.taps]
    g_TD, x_TD = head.fuse(tapped), torch.randn(rows, QWEN.hidden)
    torch.testing.assert_close(form.fuse(tapped), g_TD)
    for ends in (None, torch.tensor([2, 5])):
        wanted = head.passed(x_TD, g_TD, places, Unturned(), ends)
        found = form.passed(x_TD, g_TD.clone(), places, Unturned(), ends)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert torch.equal(form.likeliest(found.normed_TD), head.likeliest(found.normed_TD))


@torch.inference_mode()
def test_a_head_takes_the_form_of_its_model_where_it_has_one():
    spec = msgspec.structs.replace(QWEN, hidden=128, head_dim=64, intermediate=256)
    model, build = model_of(spec), ModelBuild("cpu", fused=True)
    head = EagleHead(random_spec(spec), build, 2).requires_grad_(False)
    assert convert_drafter(head, model) is None
    convert_weights(model, "w4a16")
    assert "4-bit" in convert_drafter(head, model)
    parts = (head.fc, head.layer.attention.qkv, head.layer.feed_forward.down)
    assert {type(part.form) for part in parts} == {type(model.layers[0].attention.qkv.form)}
    assert head.head.form is None  # its rows are no multiple of a tile


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-gemma3", "tiny-moe"])
@torch.inference_mode()
def test_a_part_without_a_kernel_runs_plainly_inside_the_fused_form(kernels, name):
    """Learned positions, activations without a gate, experts: no model is refused."""
    spec = msgspec.structs.replace(preset(name), windows=(), attention_softcap=0.0)
    form = Fused(model_of(spec), 64)
    hidden = form(torch.arange(6), torch.arange(6), Heads())
    assert hidden.isfinite().all()
    assert launched.count("rope_write + attention") == spec.layers
