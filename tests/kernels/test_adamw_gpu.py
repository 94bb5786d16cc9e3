"""AdamW and the norm of gradients on a GPU."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.optim.adamw import State, Step, adamw, adamw_reference
from cairn.kernels.optim.grad_norm import clip_scale, square_sum

pytestmark = pytest.mark.gpu
BF16, F32 = torch.bfloat16, torch.float32
SHAPES = [(1000, 1024), (7,), (0,), (4096,), (33, 3), (1,), (100_000,)]
TYPES = {
    "fp32": (F32, F32, F32, False),
    "masters": (BF16, BF16, F32, True),
    "bf16": (BF16, BF16, BF16, False),
}


def make_state(kind):
    weight, grad, state, masters = TYPES[kind]

    def tensors(dtype):
        return [torch.randn(shape, device="cuda").abs().to(dtype) for shape in SHAPES]

    return State(
        tensors(weight),
        tensors(grad),
        tensors(state),
        tensors(state),
        tensors(F32) if masters else None,
    )


def clone(state):
    return State(*(None if role is None else [one.clone() for one in role] for role in state))


@pytest.mark.parametrize("kind", TYPES)
def test_steps(kind):
    state = make_state(kind)
    again, wanted = clone(state), clone(state)
    scale = torch.tensor(0.5, device="cuda")
    for number in (1, 2, 16, 17):
        step = Step(number, 1e-2, weight_decay=0.1, seed=3)
        adamw(state, step, scale, impl="triton")
        adamw(again, step, scale, impl="triton")
        adamw_reference(wanted, step, scale)
    for name, role in state.roles().items():
        others = again.roles()[name]
        assert all(torch.equal(a, b) for a, b in zip(role, others, strict=True))  # in every run
        assert relative_error(role, wanted.roles()[name]) < (1e-5 if role[0].dtype == F32 else 1e-2)


def test_as_torch_has_it_in_float64():
    weight = torch.randn(300, 70, device="cuda")
    exact = weight.double().requires_grad_()
    optimizer = torch.optim.AdamW([exact], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    zeros = [torch.zeros_like(weight) for _ in range(3)]
    state = State([weight], [zeros[0]], [zeros[1]], [zeros[2]])
    for number in range(1, 11):
        state.grads[0].normal_()
        exact.grad = state.grads[0].double()
        adamw(state, Step(number, 1e-2, weight_decay=0.1), impl="triton")
        optimizer.step()
    assert relative_error(weight, exact.detach()) < 1e-5


def test_stochastic_rounding_is_right_on_average():
    size = 1 << 20
    ones = [torch.ones(size, dtype=BF16, device="cuda") for _ in range(4)]
    state = State([ones[0]], [ones[1]], [ones[2]], [ones[3]])
    for number in range(1, 9):
        adamw(state, Step(number, 2**-11, 0.0, 0.0, 0.0), impl="triton")
    assert float(ones[0].double().mean()) == pytest.approx(1 - 2**-8, abs=2**-14)


def test_a_scale_that_is_not_finite_changes_nothing():
    state = make_state("masters")
    before = clone(state)
    adamw(state, Step(1, 1e-2), torch.tensor(float("nan"), device="cuda"), impl="triton")
    for name, role in state.roles().items():
        assert all(torch.equal(a, b) for a, b in zip(role, before.roles()[name], strict=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_norm_and_clipping(dtype):
    grads = [torch.randn(shape, device="cuda").to(dtype) for shape in SHAPES]
    found = square_sum(grads, impl="triton")
    exact = sum(grad.double().square().sum() for grad in grads)
    assert relative_error(found, exact) < 1e-5
    assert torch.equal(found, square_sum(grads, impl="triton"))
    norm, scale = clip_scale(found, 1.0)
    assert relative_error(scale * norm, torch.ones((), device="cuda")) < 1e-5
