"""Optimizers against torch's own, against each other, and against what they promise."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import Same, losses, recipe, state_of, steps, weights

from cairn.core.errors import ConfigError
from cairn.kernels.optim.adamw import Step, adamw_reference
from cairn.train.checkpoint.piece import Piece
from cairn.train.config import Model, Optim, Precision
from cairn.train.optim.adamw import AdamW, by_decay
from cairn.train.optim.int8_states import BLOCK, AdamW8, pack, rounded_at_random, unpack
from cairn.train.optim.muon import Muon, orthogonal
from cairn.train.optim.optimizer import make_optimizer
from cairn.train.parallel.whole_matrices import Matrix, batches

ONE = torch.tensor(1.0)


def parameters(*, dtype=torch.float32):
    torch.manual_seed(1)
    shapes = {"embedding.weight": (20, 12), "layers.0.a.weight": (24, 12), "norm.weight": (12,)}
    return {n: torch.nn.Parameter(torch.randn(s).to(dtype)) for n, s in shapes.items()}


def gradients(ours, number):
    generator = torch.Generator().manual_seed(number)
    return {n: torch.randn(p.shape, generator=generator) for n, p in ours.items()}


def test_adamw_is_torchs_with_decay_for_matrices_only():
    ours, theirs = parameters(), parameters()
    settings = Optim(weight_decay=0.3, beta2=0.99)
    optimizer = AdamW(ours, settings, masters=False)
    groups = [
        {"params": [theirs["layers.0.a.weight"]], "weight_decay": 0.3},
        {"params": [theirs["embedding.weight"], theirs["norm.weight"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.99), eps=settings.eps)
    for number in range(1, 6):
        for group in reference.param_groups:
            group["lr"] = 0.01 * number
        for name, grad in gradients(ours, number).items():
            theirs[name].grad = grad * 0.5
        optimizer.update(gradients(ours, number), number, 0.01 * number, torch.tensor(0.5))
        reference.step()
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name])


def test_the_kernels_specification_and_torch_agree():
    one, two = parameters(), parameters()
    first, second = AdamW(one, Optim(), False), AdamW(two, Optim(), False)
    for number in (1, 2, 3):
        grads = gradients(one, number)
        first.update(grads, number, 1e-2, torch.tensor(0.8))
        for decay, names in by_decay(two).items():
            step = Step(number, 1e-2, weight_decay=0.1 if decay else 0.0)
            state = second._state(names, [grads[n] for n in names])
            adamw_reference(state, step, torch.tensor(0.8))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name])


def test_masters_keep_what_16_bits_would_lose():
    ours = {"layers.0.a.weight": torch.nn.Parameter(torch.full((4, 4), 1.0).half())}
    optimizer = AdamW(ours, Optim(weight_decay=0.0), masters=True)
    for number in range(1, 41):  # each update is a tenth of what half precision can add to 1
        optimizer.update({"layers.0.a.weight": torch.ones(4, 4).half()}, number, 1e-4, ONE)
    assert optimizer.masters["layers.0.a.weight"][0, 0].item() == pytest.approx(1 - 40e-4, rel=1e-5)
    assert ours["layers.0.a.weight"][0, 0].item() == pytest.approx(1 - 40e-4, abs=5e-4)


@given(st.integers(1, 3), st.integers(1, 2 * BLOCK + 3), st.floats(-30, 30), st.integers(0, 99))
def test_eight_bits_are_off_by_half_a_step_at_most(rows, columns, exponent, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    for value, signed, power, levels in ((x, True, 3, 127), (x.square(), False, 4, 255)):
        codes, scale = pack(value, signed)
        wide = scale.repeat_interleave(BLOCK, -1)[:, :columns]
        root = (value.abs() / wide).pow(1 / power)
        step = ((root + 0.51 / levels).pow(power) - root.pow(power)) * wide  # the next one up
        assert ((unpack(codes, scale) - value).abs() <= step * 1.001).all()
        assert ((unpack(codes, scale) > 0) == (value > 0)).all() or signed
    assert unpack(*pack(torch.zeros(2, 9), False)).abs().max() == 0


def test_eight_bits_learn_like_32():
    runs = [
        losses(steps(state_of(recipe(optim=Optim(lr=3e-3, states=kind))), 20))
        for kind in ("float32", "int8")
    ]
    assert runs[1] == pytest.approx(runs[0], abs=0.02)
    assert runs[0] != runs[1]


def test_rounding_at_random_is_right_on_average():
    generator = torch.Generator().manual_seed(5)
    x = torch.full((40_000,), 1.0 + 1.0 / 512)  # a quarter of the way between two bfloat16
    rounded = rounded_at_random(x, torch.bfloat16, generator).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 1 / 128}
    assert rounded.mean().item() == pytest.approx(x[0].item(), abs=2e-4)


def test_muon_makes_updates_orthogonal():
    x = torch.randn(3, 24, 40)
    values = torch.linalg.svdvals(orthogonal(x))
    assert (values - 1).abs().max() < 0.35  # the iteration ends near 1, not at it
    u, _, v = torch.linalg.svd(x, full_matrices=False)
    cosine = (orthogonal(x) * (u @ v)).sum() / orthogonal(x).norm() / (u @ v).norm()
    assert cosine > 0.98
    torch.testing.assert_close(orthogonal(x.mT), orthogonal(x).mT, rtol=1e-4, atol=1e-5)


def test_muon_does_not_depend_on_how_projections_are_stored():
    """Fused and separate projections hold the same matrices, and so get the same updates."""
    found = []
    for kernels in ("plain", "fused"):
        prepared = state_of(
            recipe(optim=Optim(kind="muon", lr=1e-2), precision=Precision(kernels=kernels))
        )
        found.append(losses(steps(prepared, 6)))
    assert found[0] == pytest.approx(found[1], abs=2e-4)
    assert found[0][-1] != found[0][0]


def test_muon_wants_whole_matrices():
    ours = {"layers.0.a.weight": torch.nn.Parameter(torch.randn(4, 4))}

    def halves(tensors):
        return {n: Piece(t, (8, 4), (0, 0)) for n, t in tensors.items()}

    with pytest.raises(ConfigError, match="whole"):
        Muon(ours, Optim(), False, halves)


@pytest.mark.parametrize(
    "options",
    [Optim(weight_decay=0.3, kind=kind) for kind in ("adamw", "muon")]
    + [Optim(weight_decay=0.3, states="int8")],
)
def test_a_matrix_without_a_gradient_stays_as_it_is(options):
    """Beside one of the same shape that has a gradient, and in a step in which no matrix has one."""
    torch.manual_seed(3)
    names = ("layers.0.a.weight", "layers.1.a.weight", "norm.weight")
    ours = {
        n: torch.nn.Parameter(torch.randn(4, 4) if "layers" in n else torch.ones(4)) for n in names
    }

    def cut(tensors):
        return {n: Piece(t, tuple(t.shape), (0, 0)) for n, t in tensors.items() if t.dim() > 1}

    optimizer = make_optimizer(ours, options, False, 0, cut)
    optimizer.update(gradients(ours, 1), 1, 0.1, ONE)
    before = {n: p.detach().clone() for n, p in ours.items()}
    states = {r: {n: t.clone() for n, t in ts.items()} for r, ts in optimizer.tensors().items()}
    found = gradients(ours, 2)
    for number, missing in ((2, names[:1]), (3, names[:2])):
        optimizer.update({n: g for n, g in found.items() if n not in missing}, number, 0.1, ONE)
        changed = {n for n, p in ours.items() if not torch.equal(p, before[n])}
        assert changed == set(names) - {names[0]}
    for role, tensors in optimizer.tensors().items():
        assert names[0] not in tensors or torch.equal(tensors[names[0]], states[role][names[0]])


def test_batches_by_shape_hold_everything_once():
    matrices = {str(i): Matrix("", (2 + i % 3, 4), (), i < 5) for i in range(10)}
    found = batches(matrices, 16)
    assert sorted(name for names in found for name in names) == sorted(matrices)
    assert all(len({matrices[n] for n in names}) == 1 for names in found)
    assert max(map(len, found)) == 2


def test_offloaded_states_change_nothing():
    runs = []
    for offload in (False, True):
        prepared = state_of(recipe(optim=Optim(lr=1e-2, offload=offload)))
        runs.append((losses(steps(prepared, 4)), weights(prepared)))
    assert runs[0][0] == runs[1][0]
    for name, value in runs[0][1].items():
        assert torch.equal(value, runs[1][1][name])


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_nan_factor_changes_nothing(kind):
    ours = parameters()
    make = AdamW8 if kind == "int8" else AdamW
    optimizer = make(ours, Optim(states=kind), False)
    optimizer.update(gradients(ours, 1), 1, 1e-2, ONE)
    before = {n: p.detach().clone() for n, p in ours.items()}
    states = {r: {n: t.clone() for n, t in ts.items()} for r, ts in optimizer.tensors().items()}
    optimizer.update(gradients(ours, 2), 2, 1e-2, torch.tensor(float("nan")))
    assert all(torch.equal(p, before[n]) for n, p in ours.items())
    for role, tensors in optimizer.tensors().items():
        assert all(torch.equal(t, states[role][n]) for n, t in tensors.items()), role


def test_experts_train_under_muon():
    model = Model(preset="tiny-moe", layers=1, vocab=64)
    prepared = state_of(recipe(model=model, optim=Optim(kind="muon", lr=1e-2)))
    found = losses(steps(prepared, 8, Same(64, 32)))
    assert found[-1] < found[0] - 0.3


@pytest.mark.parametrize("options", [Optim(lr=1e-2, states="int8"), Optim(lr=1e-2, kind="muon")])
def test_biases_of_experts_are_vectors_that_lie_together(options):
    """They are updated, never shrunk, and a checkpoint has every state of theirs."""
    prepared = state_of(recipe(model=Model(preset="tiny-gpt-oss"), optim=options))
    ours, before = prepared.state.parallel.parameters(), weights(prepared)
    assert not [name for name in by_decay(ours)[True] if "bias" in name]
    steps(prepared, 1)
    assert not [name for name, value in before.items() if torch.equal(value, ours[name])]
    parts = {n: (tuple(p.tensor.shape), p.shape) for n, p in prepared.state.pieces().items()}
    assert not {n: shapes for n, shapes in parts.items() if shapes[0] != shapes[1]}
