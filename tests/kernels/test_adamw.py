"""The optimizer's reference against torch, its random bits, and wrong arguments."""

import math

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.optim.adamw import State, Step, adamw
from cairn.kernels.optim.grad_norm import clip_scale, square_sum


def zeros(shape, dtype=torch.float32):
    return [torch.zeros(shape, dtype=dtype)]


def test_as_torch_has_it():
    weight = torch.randn(7, 5)
    mine, theirs = weight.clone(), weight.double().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2)
    state = State([mine], zeros((7, 5)), zeros((7, 5)), zeros((7, 5)))
    for number in range(1, 8):
        grad = torch.randn(7, 5)
        state.grads[0].copy_(grad)
        theirs.grad = grad.double() * 0.5
        adamw(state, Step(number, 0.01, 0.8, 0.99, 1e-6, 0.2), torch.tensor(0.5))
        optimizer.step()
    assert relative_error(mine, theirs.detach()) < 1e-6


def test_clipping_as_torch_has_it():
    parameters = [torch.randn(6, 3, requires_grad=True), torch.randn(4, requires_grad=True)]
    for one in parameters:
        one.grad = torch.randn_like(one)
    grads = [one.grad.clone() for one in parameters]
    norm, scale = clip_scale(square_sum(grads), 0.7)
    wanted = torch.nn.utils.clip_grad_norm_(parameters, 0.7)
    assert relative_error(norm, wanted) < 1e-6
    assert relative_error([grad * scale for grad in grads], [one.grad for one in parameters]) < 1e-5


def test_stochastic_rounding_keeps_what_rounding_to_nearest_loses():
    size = 4096
    ones = [torch.ones(size, dtype=torch.bfloat16) for _ in range(4)]
    state = State([ones[0]], [ones[1]], [ones[2]], [ones[3]])
    for number in range(1, 9):  # each step moves by 1/8 of the last bit
        adamw(state, Step(number, 2**-11, 0.0, 0.0, 0.0))
    assert float(ones[0].double().mean()) == pytest.approx(1 - 2**-8, abs=2**-11)


def test_every_step_and_seed_has_bits_of_its_own():
    keys = {Step(number, 0.1, seed=seed).key() for number in range(1, 50) for seed in (0, 1, 2**33)}
    assert len(keys) == 3 * 49
    assert all(-(2**31) <= key < 2**31 for key in keys)


def test_the_step_size_survives_many_steps():
    numbers = Step(10**6, 0.1, 0.9, 0.999).coefficients()
    assert all(math.isfinite(number) for number in numbers)


WRONG = {
    "weights: wanted at least one": lambda: adamw(State([], [], [], []), Step(1, 0.1)),
    "step.number: wanted 1 or more": lambda: adamw(State(*[zeros(3)] * 4), Step(0, 0.1)),
    "v[0]: wanted float32": lambda: adamw(
        State(*[zeros(3)] * 3, zeros(3, torch.bfloat16)), Step(1, 0.1)
    ),
    "m[0]: wanted float32 or bfloat16": lambda: adamw(
        State(*[zeros(3)] * 2, *[zeros(3, torch.float16)] * 2), Step(1, 0.1)
    ),
    "masters[0]: wanted float32": lambda: adamw(
        State(*[zeros(3)] * 4, zeros(3, torch.bfloat16)), Step(1, 0.1)
    ),
    "scale: wanted one element": lambda: adamw(State(*[zeros(3)] * 4), Step(1, 0.1), torch.ones(2)),
    "grads: wanted at least one": lambda: square_sum([]),
    "grads[0]: wanted float32": lambda: square_sum([torch.ones(3).int()]),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    pattern = message.replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(ValueError, match="^" + pattern):
        WRONG[message]()
