"""Training with fake quantisation ends in the model it trained; distillation is the divergence it says it is."""

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_runs import TINY, Same, losses, recipe, state_of, steps

from cairn.core.errors import CairnError
from cairn.models.attend import PackedDocuments
from cairn.models.build import ModelBuild
from cairn.models.checkpoint import open_checkpoint
from cairn.models.export import export
from cairn.models.quantized.rounding import QuantizationGrid, fake_quantized
from cairn.models.weights import random_model
from cairn.train.config import Checkpoint, Data, Distill, Precision, Qat
from cairn.train.data.batch import IGNORED, make_batch
from cairn.train.describe import shape_of
from cairn.train.distill import IDS, LOGP, Distillation, Teacher, top_divergence
from cairn.train.parallel.layout import Layout
from cairn.train.products import product
from cairn.train.qat import FakeQuantized
from cairn.train.run import run

GRID = QuantizationGrid("int4", 16)
TWO_HEADS = msgspec.structs.replace(TINY, kv_heads=2)


def test_gradients_pass_through_the_rounding():
    x_MK = torch.randn(5, 32, requires_grad=True)
    w_NK = torch.randn(7, 32, requires_grad=True)
    y_MN = product(x_MK, w_NK, FakeQuantized(GRID))
    rounded_NK = fake_quantized(w_NK, GRID, torch.float32)
    torch.testing.assert_close(y_MN, x_MK @ rounded_NK.t())
    g_MN = torch.randn(5, 7)
    y_MN.backward(g_MN)
    torch.testing.assert_close(x_MK.grad, g_MN @ rounded_NK)
    torch.testing.assert_close(w_NK.grad, g_MN.t() @ x_MK)


@pytest.mark.parametrize("kernels", ["plain", "fused"])
def test_a_run_learns_with_rounded_weights_in_both_forms(kernels: str):
    config = recipe(
        qat=Qat(scheme="w4a16", group=16), steps=12, precision=Precision(kernels=kernels)
    )
    found = losses(steps(state_of(config), 12, Same(64, 32)))
    assert found[-1] < 0.7 * found[0]
    if kernels == "fused":
        plain = msgspec.structs.replace(config, precision=Precision(kernels="plain"))
        both = zip(found[:4], losses(steps(state_of(plain), 4, Same(64, 32))), strict=True)
        # Later a last bit decides here and there which level is the nearest.
        assert all(one == pytest.approx(other, rel=1e-3) for one, other in both)


def test_what_is_exported_computes_what_was_trained(tmp_path):
    config = recipe(
        tmp_path / "run", steps=4, qat=Qat(scheme="w4a16", group=16), checkpoint=Checkpoint(every=0)
    )
    run(config, log_line=lambda text: None)
    spec = shape_of(TINY)
    trained = open_checkpoint(tmp_path / "run" / "model").load("cpu", torch.float32)
    from safetensors.torch import load_file

    held = load_file(tmp_path / "run" / "model-w4a16" / "model.safetensors")
    weight = trained.get_parameter("layers.1.feed_forward.down.weight").detach()
    packed = held["model.layers.1.mlp.down_proj.weight_packed"]
    nibbles = (packed[..., None] >> torch.arange(0, 32, 4)) & 15
    scales = held["model.layers.1.mlp.down_proj.weight_scale"].repeat_interleave(16, 1)
    read = (nibbles.flatten(1).float() - 8) * scales
    torch.testing.assert_close(read, fake_quantized(weight, GRID, torch.float32))
    assert spec.intermediate == read.shape[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precision": Precision(fp8="row")}, "both round the products"),
        ({"parallel": Layout(tp=2), "model": TWO_HEADS}, "with tp 2"),
        ({"qat": Qat(scheme="nvfp4", group=16)}, "has no groups of 16"),
    ],
)
def test_what_cannot_be_rounded_is_refused(changes, message):
    with pytest.raises(CairnError, match=message):
        state_of(recipe(**({"qat": Qat(scheme="w8a8")} | changes)))


# -- distillation -------------------------------------------------------------------------------


@given(st.integers(2, 9), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_the_divergence_of_the_top_is_bounded_by_the_whole_one(vocab: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    p, q = torch.randn(2, 4, vocab, generator=generator).log_softmax(-1)
    whole = (p.exp() * (p - q)).sum(-1)
    for top in range(1, vocab + 1):
        best = p.topk(top, dim=-1)
        found = top_divergence(best.values, q.gather(-1, best.indices))
        assert (found <= whole + 1e-4).all()
        assert (found >= -1e-5).all()
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)
    best = p.topk(1, dim=-1)
    assert top_divergence(best.values, best.values).abs().max() < 1e-5


def batch_of(vocab: int, count: int = 24):
    tokens_T = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(1))
    targets_T = tokens_T.roll(-1)
    targets_T[::5] = IGNORED
    return make_batch(tokens_T, targets_T, [count // 2, count // 2], [0])


def test_the_loss_is_the_weighted_sum_of_both_terms_and_chunks_do_not_matter():
    spec = shape_of(TINY)
    teacher, student = (random_model(spec, ModelBuild("cpu"), seed) for seed in (1, 2))
    wanted = Distill(teacher="x", top=spec.vocab, weight=0.7, temperature=2.0)
    batch = batch_of(spec.vocab)
    batch = batch._replace(extra=Teacher(teacher, wanted).streams(batch))
    assert batch.extra[IDS].shape == batch.extra[LOGP].shape == (24, spec.vocab)
    attend, valid = PackedDocuments(batch.lengths), torch.tensor(float(batch.valid()))
    hidden_TD = student(batch.tokens_T, batch.positions_T, attend).detach().requires_grad_()
    loss = Distillation(spec, wanted)(hidden_TD, student.embedding, batch, valid)
    scores_TV = student.logits(hidden_TD)
    with torch.no_grad():
        theirs_TV = teacher.logits(teacher(batch.tokens_T, batch.positions_T, attend)) / 2
    kl_T = torch.nn.functional.kl_div(
        (scores_TV / 2).log_softmax(-1),
        theirs_TV.log_softmax(-1),
        log_target=True,
        reduction="none",
    ).sum(-1)
    counts = batch.targets_T != IGNORED
    right = torch.nn.functional.cross_entropy(scores_TV, batch.targets_T, reduction="sum")
    expected = (0.7 * 4 * kl_T[counts].sum() + 0.3 * right) / valid
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    in_chunks = Distillation(spec, wanted, chunk=7)(hidden_TD, student.embedding, batch, valid)
    for one in (loss, in_chunks):
        hidden_TD.grad = None
        one.backward(retain_graph=True)
        gradient = hidden_TD.grad.clone()
        hidden_TD.grad = None
        expected.backward(retain_graph=True)
        torch.testing.assert_close(gradient, hidden_TD.grad, rtol=1e-3, atol=1e-5)


def test_a_run_learns_from_its_teacher(tmp_path):
    """A teacher over the same random tokens: the student comes nearer to it than cross entropy alone would bring it."""
    spec = shape_of(TINY)
    export(random_model(spec, ModelBuild("cpu", torch.float32), seed=5), tmp_path / "teacher")
    teacher = open_checkpoint(tmp_path / "teacher")
    assert teacher.spec.vocab == spec.vocab
    config = recipe(
        tmp_path / "run",
        steps=30,
        distill=Distill(teacher=str(tmp_path / "teacher"), weight=1.0),
        data=Data(sources=["random"], sequence=32, sequences=4, microbatch=2),
    )
    done = run(config, log_line=lambda text: None)
    assert done.outcome.last_loss is not None
    assert done.outcome.last_loss < 0.7 * done.outcome.first_loss


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path):
    spec = msgspec.structs.replace(shape_of(TINY), vocab=80)
    export(random_model(spec, ModelBuild("cpu", torch.float32)), tmp_path / "teacher")
    config = recipe(tmp_path / "run", distill=Distill(teacher=str(tmp_path / "teacher")))
    with pytest.raises(CairnError, match="has 80 tokens, the student 64"):
        run(config, log_line=lambda text: None)
