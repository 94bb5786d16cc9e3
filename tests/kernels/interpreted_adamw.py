"""AdamW and the norm of gradients in the interpreter."""

from cairn.kernels.interpret import reachable  # isort: skip
import math
from contextlib import contextmanager

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.optim.adamw import State, Step, _random_bits, adamw, adamw_reference
from cairn.kernels.optim.grad_norm import clip_scale, square_sum
from cairn.kernels.optim.tensor_table import CHUNK, tables

BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(3, 16), (5,), (0,), (32,), (1,)]
TYPES = {
    "fp32": (F32, F32, F32, False),
    "masters": (BF16, BF16, F32, True),
    "bf16": (BF16, BF16, BF16, False),
    "fp32 grads": (BF16, F32, F32, True),
}


def make_state(kind, shapes=SHAPES):
    weight, grad, state, masters = TYPES[kind]

    def tensors(dtype, positive=False):
        made = [torch.randn(shape) for shape in shapes]
        return [(one.abs() if positive else one).to(dtype) for one in made]

    return State(
        tensors(weight),
        tensors(grad),
        tensors(state),
        tensors(state, True),
        tensors(F32) if masters else None,
    )


def clone(state):
    return State(*(None if role is None else [one.clone() for one in role] for role in state))


@contextmanager
def within(state):
    names = {
        f"{name}_{i}": one for name, role in state.roles().items() for i, one in enumerate(role)
    }
    with reachable(**{name: one for name, one in names.items() if one.numel()}):
        yield


def run(state, step, scale=None):
    with within(state):
        adamw(state, step, scale, impl="triton")


@pytest.mark.parametrize("kind", TYPES)
def test_one_step(kind):
    state, step = make_state(kind), Step(3, 0.01, weight_decay=0.1, seed=5)
    wanted = clone(state)
    run(state, step, torch.tensor(0.25))
    adamw_reference(wanted, step, torch.tensor(0.25))
    for name, role in state.roles().items():
        assert relative_error(role, wanted.roles()[name]) < (1e-6 if role[0].dtype == F32 else 1e-3)


def test_as_torch_has_it_in_float64():
    shape = (4, 12)
    weight = torch.randn(shape)
    exact = weight.double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr=0.02, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    state = State([weight], [torch.empty(shape)], [torch.zeros(shape)], [torch.zeros(shape)])
    for number in range(1, 6):
        state.grads[0].normal_()
        exact.grad = state.grads[0].double()
        run(state, Step(number, 0.02, weight_decay=0.1))
        optimizer.step()
    assert relative_error(weight, exact.detach()) < 1e-5


def test_a_master_rounds_to_its_weight():
    state = make_state("masters")
    run(state, Step(1, 0.01))
    for weight, master in zip(state.weights, state.masters, strict=True):
        assert torch.equal(weight, master.to(BF16))


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_a_scale_that_is_not_finite_changes_nothing(scale):
    state = make_state("masters")
    before = clone(state)
    run(state, Step(1, 0.01), torch.tensor(scale))
    for name, role in state.roles().items():
        assert all(torch.equal(a, b) for a, b in zip(role, before.roles()[name], strict=True))


def test_stochastic_rounding_is_right_on_average_and_can_be_repeated():
    # A change of 1/8 of the last bit of a weight is lost by rounding to nearest, every time.
    size = 8192
    one = [torch.ones(size, dtype=BF16)]
    moments = [torch.full((size,), 1.0, dtype=BF16)]
    state = State(one, [torch.ones(size, dtype=BF16)], moments, [torch.ones(size, dtype=BF16)])
    step = Step(1, 2**-11, beta1=0.0, beta2=0.0, eps=0.0, seed=1)
    again, later = clone(state), clone(state)
    run(state, step)
    moved = (state.weights[0] != 1).float().mean()
    assert 0.11 < moved < 0.14  # of 2**-8, the distance to the next smaller weight: 1/8
    assert abs(float(state.weights[0].double().mean()) - (1 - 2**-11)) < 2**-14
    run(again, step)
    assert torch.equal(again.weights[0], state.weights[0])
    run(later, step._replace(number=2))
    assert not torch.equal(later.weights[0], state.weights[0])


def test_random_bits_are_the_same_in_both_forms_and_uniform():
    state = make_state("bf16", [(2 * CHUNK + 48,)])
    wanted, step = clone(state), Step(9, 0.01, seed=2**40 + 3)
    run(state, step)
    adamw_reference(wanted, step)
    differ = (state.weights[0] != wanted.weights[0]).float().mean()
    assert differ < 1e-3  # other bits would differ at almost every second element
    for bits in _random_bits(step.key(), 0, state.weights[0]):
        assert abs(float(bits.double().mean()) / 32767.5 - 1) < 0.01
        assert len(bits.unique()) > 0.4 * CHUNK


def test_nan_is_kept():
    state = make_state("bf16", [(16,)])
    state.grads[0][3] = math.nan
    run(state, Step(1, 0.01))
    for role in (state.weights, state.m, state.v):
        assert role[0].isnan().nonzero().tolist() == [[3]]


def test_tables_are_kept_and_odd_tensors_set_apart():
    state = make_state("fp32")
    first = tables(**state.roles())
    assert tables(**state.roles()) is first
    assert [table.aligned for table in first] == [True, False]
    assert [table.numbers.tolist() for table in first] == [[0, 3], [1, 4]]
    flat = torch.randn(40)
    apart = tables(grads=[flat[1:33]])  # 4 bytes off
    assert [table.aligned for table in apart] == [False]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_square_sum(dtype):
    grads = [torch.randn(shape).to(dtype) for shape in [(70, 70), (5,), (0,), (64,), (CHUNK + 16,)]]
    exact = sum(grad.double().square().sum() for grad in grads)
    with reachable(**{f"g{i}": grad for i, grad in enumerate(grads) if grad.numel()}):
        found = square_sum(grads, impl="triton")
        assert torch.equal(square_sum(grads, impl="triton"), found)
    assert relative_error(found, exact) < 1e-5


def test_clipping():
    norm, scale = clip_scale(torch.tensor(16.0), 1.0)
    assert norm == 4
    assert scale == pytest.approx(0.25, rel=1e-5)
    assert clip_scale(torch.tensor(0.25), 1.0)[1] == 1
    assert clip_scale(torch.tensor(math.inf), 1.0)[1].isnan()
    assert clip_scale(torch.tensor(math.nan), 1.0)[1].isnan()
