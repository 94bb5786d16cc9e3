"""A recorded step computes bit for bit what the lean form does, and models that decide on the way have none.

Packed products are too wide for tiny models: `test_cpu_weights` replays those.
"""

import pytest
import tiny_checkpoints
import torch

from cairn.models.cache import cache_groups
from cairn.models.checkpoint import open_checkpoint
from cairn.models.lean import Lean
from cairn.models.lean import obstacle as lean_obstacle
from cairn.models.linear.packed import Int8
from cairn.models.transformer import Transformer
from cairn.serve.engine.cpu_weights import pack_weights
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.recorded_step import Recorded, obstacle, serving_form

PAGE, PAGES = 16, 12
IN_A_ROW, SCATTERED = [3, 4, 5], [3, 7, 5]
LENGTHS = (1, 2, 16, 17, 40)  # of a sequence, this token included


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(family: str) -> Transformer:
    model = open_checkpoint(tiny_checkpoints.folder(family)).load("cpu", torch.float32)
    return model.requires_grad_(False)


def filled(model: Transformer) -> PagePool:
    pool = PagePool(cache_groups(model.spec, grouped=False), PAGES, PAGE, torch.float32, "cpu")
    pool.cache.normal_(generator=torch.Generator().manual_seed(0))
    return pool


def token(pool: PagePool, pages: list[int], length: int) -> tuple[torch.Tensor, Paged]:
    """The position of a sequence's last token, and its attend."""
    place = length - 1
    slot = pages[place // PAGE] * PAGE + place % PAGE
    position, slots, lengths = (
        torch.tensor([number], dtype=torch.int32) for number in (place, slot, length)
    )
    table = torch.tensor([pages], dtype=torch.int32)
    return position, Paged(pool, slots[None], position, lengths, table[None], None)


def recordable(family: str) -> Transformer:
    model = tiny(family)
    if why := lean_obstacle(model) or obstacle(model):
        pytest.skip(f"a step of {family} is not recorded: {why}")
    return model


@pytest.mark.parametrize("family", tiny_checkpoints.FAMILY_NAMES)
@torch.inference_mode()
def test_a_replay_is_the_lean_form_bit_for_bit(family):
    model = recordable(family)
    lean_pool, pool = filled(model), filled(model)
    lean, recorded = Lean(model), Recorded(Lean(model), pool)
    for length in LENGTHS:
        tokens = torch.tensor([length * 7 % model.spec.vocab])
        expected = lean(tokens, *token(lean_pool, IN_A_ROW, length))
        assert torch.equal(recorded(tokens, *token(pool, IN_A_ROW, length)), expected)
    assert torch.equal(pool.cache[:, :, 1:], lean_pool.cache[:, :, 1:])  # page 0 is nobody's


@pytest.mark.parametrize("form", [Recorded, lambda lean, pool: lean], ids=["recorded", "lean"])
@torch.inference_mode()
def test_pages_in_any_order_give_the_same_bit_for_bit(form):
    """An answer to one person does not depend on where its pages lie, and neither does what it leaves there."""
    model = recordable("qwen3")
    near, far = filled(model), filled(model)
    far.cache[:, :, SCATTERED] = near.cache[:, :, IN_A_ROW]
    ours, gathered = form(Lean(model), near), form(Lean(model), far)
    for length in LENGTHS:
        position, attend = token(far, SCATTERED, length)
        found = gathered(torch.tensor([5]), position, attend)
        expected = ours(torch.tensor([5]), *token(near, IN_A_ROW, length))
        assert torch.equal(found, expected)
        assert (attend.single_token.kept is None) == (
            length <= PAGE
        )  # a single page is always in a row
    assert torch.equal(far.cache[:, :, SCATTERED], near.cache[:, :, IN_A_ROW])


def test_models_that_decide_on_the_way_are_not_recorded():
    seen = {}
    for family in tiny_checkpoints.FAMILY_NAMES:
        model = tiny(family)
        if lean_obstacle(model) is None:
            seen[family] = obstacle(model)
            form = serving_form(model, filled(model))
            assert isinstance(form, Recorded) == (seen[family] is None)
    assert None in seen.values()
    assert any(why and "experts" in why for why in seen.values()), seen
    assert any(why and "window" in why for why in seen.values()), seen


def test_what_torch_cannot_record_is_said():
    model = tiny("qwen3")
    model.requires_grad_(True)
    assert "trained" in (obstacle(model) or "")
    if Int8.obstacle(8, 64) is None:
        pack_weights(model, "int8", 16.0)
        assert "packed products" in (obstacle(model) or "")
