"""One sequence with several tokens attends over views of its pages as over gathered ones."""

import pytest
import torch

from cairn.models.attend import AttentionRule
from cairn.models.cache import CacheGroup
from cairn.models.mixer import Plane
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.single_sequence import MOST_TOKENS

PAGE, PAGES, LAYERS, KV_HEADS, SIZE = 4, 24, 2, 2, 8
IN_A_ROW = list(range(3, 15))
SCATTERED = [9, 4, 17, 3, 20, 11, 6, 14, 1, 22, 13, 8]


def filled() -> PagePool:
    planes = Plane("keys", KV_HEADS, SIZE), Plane("values", KV_HEADS, SIZE)
    group = CacheGroup(layers=tuple(range(LAYERS)), planes=planes)
    pool = PagePool((group,), PAGES, PAGE, torch.float32, "cpu")
    pool.cache.normal_(generator=torch.Generator().manual_seed(0))
    return pool


def step(pool: PagePool, pages: list[int], length: int, tokens: int) -> Paged:
    """The last tokens of a sequence of so many."""
    places = torch.arange(length - tokens, length, dtype=torch.int32)
    table = torch.tensor(pages, dtype=torch.int32)
    slots = table[(places // PAGE).long()] * PAGE + places % PAGE
    bounds = torch.tensor([0, tokens], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    return Paged(pool, slots[None], places, lengths, table[None, None], bounds)


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("pages", [IN_A_ROW, SCATTERED], ids=["in a row", "scattered"])
@pytest.mark.parametrize(("length", "tokens"), [(2, 2), (9, 4), (31, 5), (40, 16), (48, 3)])
@torch.inference_mode()
def test_views_give_what_gathered_pages_give(length, tokens, pages, group):
    viewed, gathered = filled(), filled()
    heads, chance = group * KV_HEADS, torch.Generator().manual_seed(length)
    ours, general = step(viewed, pages, length, tokens), step(gathered, pages, length, tokens)
    assert ours.few_tokens is not None
    general.few_tokens = None
    for layer in range(LAYERS):
        qkv_TEC = torch.randn(tokens, heads + 2 * KV_HEADS, SIZE, generator=chance)
        rule = AttentionRule(layer, SIZE**-0.5)
        found = ours.joined(qkv_TEC.clone(), heads, rule)
        wanted = general.joined(qkv_TEC.clone(), heads, rule)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(viewed.cache, gathered.cache)  # what the step leaves behind


@torch.inference_mode()
def test_windows_and_caps_are_left_to_the_general_form():
    pools, chance = (filled(), filled()), torch.Generator().manual_seed(1)
    qkv_TEC = torch.randn(4, 3 * KV_HEADS, SIZE, generator=chance)
    for rule in (
        AttentionRule(0, 0.3, window=6),
        AttentionRule(1, 0.3, softcap=2.0),
        AttentionRule(1, 0.3, window=64),
    ):
        ours, general = (step(pool, SCATTERED, 30, 4) for pool in pools)
        general.few_tokens = None
        found, wanted = (one.joined(qkv_TEC.clone(), KV_HEADS, rule) for one in (ours, general))
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(pools[0].cache, pools[1].cache)


def test_a_prompt_and_padding_are_no_few_tokens():
    pool = filled()
    assert step(pool, IN_A_ROW, 48, MOST_TOKENS + 1).few_tokens is None
    assert step(pool, IN_A_ROW, 48, 1).few_tokens is None
    padded = step(pool, IN_A_ROW, 9, 3)
    padded.slots_GT[0, -1] = -1
    assert padded.few_tokens is None
