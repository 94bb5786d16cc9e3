"""Packed matrices keep what they say they keep, and their products err no more than rounding explains."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cairn.models.linear.packed import (
    DIGIT_ROWS,
    GROUP,
    LEVELS,
    Int4,
    Int8,
    Levels,
    row_scales,
    saturates,
)

NONE = torch.tensor([], dtype=torch.long)
TOKENS = (1, 3, 8, 40)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def lattice(rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix as Q4_1 stores it: every group has a smallest and a largest level."""
    chance = torch.Generator().manual_seed(seed)
    shape = (rows, columns // GROUP, GROUP)
    level = torch.randint(0, LEVELS + 1, shape, generator=chance)
    level[..., 0], level[..., 1] = 0, LEVELS
    scale = (torch.rand(shape[:2], generator=chance) * 0.02 + 0.001).bfloat16().float()
    low = -scale * (7 + 2 * torch.rand(shape[:2], generator=chance))
    return (level * scale[..., None] + low[..., None]).view(rows, columns)


def activations(tokens: int, columns: int, seed: int = 1) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, columns, generator=chance)


def forms(weight_NK: Tensor, outliers_O: Tensor = NONE) -> list[Int4 | Int8]:
    shape = tuple(weight_NK.shape)
    made: list[Int4 | Int8] = []
    if Int4.obstacle(*shape) is None:
        made.append(Int4(Levels(weight_NK), outliers_O))
    if Int8.obstacle(*shape) is None:
        made.append(Int8(weight_NK, outliers_O))
    if not made:
        pytest.skip("this CPU has no packed product")
    return made


def worst_error(form: Int4 | Int8, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """More than rounding can do: half a step of x under each weight, and what the form changed of the weight."""
    x, w = x_MK.double(), weight_NK.double()
    step_M1 = 2 * x.abs().amax(-1, keepdim=True) / 254
    if isinstance(form, Int8):
        step_M1 = step_M1 / 254
        weight_step_N = row_scales(weight_NK, saturates()).double() / 2
    else:
        weight_step_N = (Levels(weight_NK).weight_NK().double() - w).abs().amax(-1)
    of_x = step_M1 * w.abs().sum(-1)  # a whole step: the zero point is rounded as well
    of_w = x.abs().sum(-1, keepdim=True) * weight_step_N
    return of_x + of_w + 1e-5 * (x.abs() @ w.abs().t())


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), groups=st.integers(1, 5), seed=st.integers(0, 1000))
def test_levels_keep_a_matrix_that_has_sixteen_of_them(rows, groups, seed):
    weight = lattice(rows, groups * GROUP, seed)
    levels = Levels(weight)
    assert levels.exact(weight)
    assert torch.allclose(levels.weight_NK(), weight, rtol=0, atol=0.04 * 0.021)


def test_levels_know_that_other_matrices_change():
    weight = torch.randn(16, 4 * GROUP, generator=torch.Generator().manual_seed(0))
    levels = Levels(weight)
    assert not levels.exact(weight)
    step = levels.scale_NG.float().repeat_interleave(GROUP, dim=1)
    assert (
        (levels.weight_NK() - weight).abs() <= 0.75 * step
    ).all()  # half a step, and the mean put right


def test_a_group_of_equal_values_is_kept():
    weight = torch.full((3, 2 * GROUP), 0.25)
    assert torch.equal(Levels(weight).weight_NK(), weight)
    for form in forms(weight):
        x = activations(2, 2 * GROUP)
        assert torch.allclose(form.product(x), x @ weight.t(), atol=0.3)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", [(96, 64), (17, 576), (64, 1536)])
def test_a_product_errs_no_more_than_rounding_explains(tokens, shape):
    weight, x = lattice(*shape), activations(tokens, shape[1])
    exact = x.double() @ weight.double().t()
    for form in forms(weight):
        error = (form.product(x).double() - exact).abs()
        assert (error <= worst_error(form, x, weight)).all(), type(form).__name__
        assert error.norm() <= 0.03 * exact.norm(), type(form).__name__


@pytest.mark.parametrize("tokens", TOKENS)
def test_outliers_cost_the_other_columns_nothing(tokens):
    """Columns a hundred times as large as the rest: rounded, they would leave the rest a level or two."""
    weight, x = lattice(48, 576), activations(tokens, 576)
    outliers = torch.tensor([5, 100, 575])
    x[:, outliers] *= 300
    exact = x.double() @ weight.double().t()
    rest = x.clone()
    rest[:, outliers] = 0
    for form in forms(weight, outliers):
        error = (form.product(x).double() - exact).abs()
        allowed = worst_error(form, rest, weight) + 4e-3 * (
            x.abs().double() @ weight.abs().double().t()
        )
        assert (error <= allowed).all(), type(form).__name__
        if isinstance(form, Int4):  # and without the split they do cost
            unsplit = Int4(Levels(weight), NONE)
            assert (unsplit.product(x).double() - exact).norm() > 2 * error.norm()


def test_no_token_pays_for_another():
    """A token of small numbers beside one of large numbers is rounded by its own range."""
    weight, x = lattice(32, 128), activations(10, 128)
    x[1:] *= 1000
    exact = x[:1].double() @ weight.double().t()
    for form in forms(weight):
        error = (form.product(x)[:1].double() - exact).abs()
        assert (error <= worst_error(form, x[:1], weight)).all(), type(form).__name__


@pytest.mark.parametrize("rows", [1, 2, 8, DIGIT_ROWS])
def test_a_token_is_rounded_the_same_in_every_batch(rows):
    """8-bit rows: as float32 rounds, since sums of levels are whole numbers; beyond so many rows, to 16 bits."""
    weight, x = lattice(40, 128), activations(DIGIT_ROWS + 8, 128)
    x[3] *= 1000
    if Int8.obstacle(*weight.shape):
        pytest.skip("this CPU has no packed product")
    form = Int8(weight, NONE)
    alone = torch.cat([form.product(one[None]) for one in x])
    found = torch.cat([form.product(some) for some in x.split(rows)])
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    largest = x.abs().amax(-1, keepdim=True).double() * weight.abs().sum(-1)
    assert ((form.product(x).double() - alone).abs() <= largest / 127 / 254).all()


@settings(max_examples=25, deadline=None)
@given(columns=st.integers(2, 9), seed=st.integers(0, 1000))
def test_levels_of_neighbours_fit_into_sixteen_bits(columns, seed):
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(seed))
    level = (weight / row_scales(weight, True)[:, None]).round()
    assert level.abs().max() <= 127
    pairs = torch.nn.functional.pad(level, (0, columns % 2)).unflatten(1, (-1, 2))
    most = pairs.clamp(min=0).sum(-1).maximum(pairs.clamp(max=0).sum(-1).abs()) * 255
    assert most.max() < 2**15


@pytest.mark.parametrize("rows", [1, 8, 40])
def test_compiled_digits_give_what_torch_gives(rows):
    torch.manual_seed(rows)
    weight_NK, x_MK = torch.randn(96, 160), torch.randn(rows, 160)
    x_MK[:, 7] *= 50
    form = Int8(weight_NK, torch.tensor([7, 31]))
    if form.digits is None:
        pytest.skip("there is no C compiler here")
    compiled = form.product(x_MK)
    form.digits = None
    torch.testing.assert_close(compiled, form.product(x_MK), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(compiled, x_MK @ weight_NK.T, rtol=0.05, atol=0.5)


def test_zeros_give_zeros():
    weight = lattice(16, 64)
    for form in forms(weight):
        assert form.product(torch.zeros(2, 64)).abs().max() < 1e-30


def test_packing_leaves_the_choice_of_library_alone():
    before = torch.backends.quantized.engine
    forms(lattice(8, 64))
    assert torch.backends.quantized.engine == before
