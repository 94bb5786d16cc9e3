"""What a model keeps: groups, planes and pages, against sums over layers and tokens."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.models.cache import (
    MOST_GROUPS,
    CacheGroup,
    Plane,
    cache_bytes,
    cache_bytes_per_token,
    cache_groups,
    page_bytes,
    page_layers,
    paged,
    pages_of,
)
from cairn.models.presets import PRESETS, preset
from cairn.serve.engine.pages import PagePool


@pytest.mark.parametrize("name", PRESETS)
def test_every_layer_is_in_one_group_of_its_kind(name):
    spec = preset(name)
    groups = cache_groups(spec)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(spec.layers))
    for group in groups:
        assert {spec.window(layer) for layer in group.layers} == {group.window}
        assert {spec.keeps_state(layer) for layer in group.layers} == {group.kind == "state"}
    for group in paged(groups):
        assert group.kind == ("window" if group.window else "full")
        assert len(group.layers) <= page_layers(groups)
    assert len(groups) <= MOST_GROUPS
    assert len(paged(cache_groups(spec, grouped=False))) == 1


def test_models_without_windows_have_one_group_whose_pages_hold_all_layers():
    spec = preset("qwen3-0.6b")
    (group,) = cache_groups(spec)
    assert group.planes == (Plane("k", 8, 128), Plane("v", 8, 128))
    assert (
        page_bytes((group,), 64, 2) == 64 * 28 * 2 * 8 * 128 * 2 == 64 * cache_bytes_per_token(spec)
    )
    (half,) = cache_groups(spec, shards=2)
    assert 2 * page_bytes((half,), 64, 2) == page_bytes((group,), 64, 2)


@pytest.mark.parametrize(
    ("name", "most"),
    [("gemma-3-270m", 0.25), ("gemma-3-1b", 0.25), ("gemma-3-4b", 0.26), ("gemma-3-27b", 0.29)],
)
@pytest.mark.parametrize("page_size", [16, 64])
def test_windows_hold_a_quarter_of_the_bytes_at_8k(name, most, page_size):
    """4b and larger have windows of 1024: without any rounding they need 25.4% and 26.6%."""
    spec = preset(name)
    groups, plain = cache_groups(spec), cache_groups(spec, grouped=False)
    held = pages_of(groups, 8192, page_size) * page_bytes(groups, page_size, 2)
    before = pages_of(plain, 8192, page_size) * page_bytes(plain, page_size, 2)
    assert before == cache_bytes_per_token(spec) * 8192
    assert cache_bytes(spec, 8192) <= held <= most * before


@given(
    window=st.integers(1, 70), computed=st.integers(0, 300), page_size=st.sampled_from([1, 4, 16])
)
def test_the_first_page_is_that_of_the_oldest_token_seen(window, computed, page_size):
    group = CacheGroup("window", window)
    seen = [token for token in range(computed + 1) if token > computed - window]
    assert group.first_page(computed, page_size) == seen[0] // page_size
    pages = {token // page_size for token in seen}
    assert group.pages_of(computed + 1, page_size) == len(pages)
    assert CacheGroup().first_page(computed, page_size) == 0


def test_planes_of_another_type_count_their_own_bytes():
    quantised = CacheGroup("full", 0, (0, 1), (Plane("k", 4, 64), Plane("k scale", 4, 1, 4.0)))
    assert page_bytes((quantised,), 16, 1) == 16 * 2 * (4 * 64 + 4 * 4)
    latent = CacheGroup("full", 0, (0,), (Plane("latent", 1, 576),))
    assert page_bytes((latent,), 64, 2) == 64 * 576 * 2


def test_a_float8_cache_of_latent_rows_has_scales_and_wide_keys():
    spec = preset("deepseek-v2-lite")
    groups, of_token = cache_groups(spec), cache_bytes_per_token(spec, 1) / spec.layers
    assert of_token == 512 + 4 * 4 + 2 * 64
    pool = PagePool(groups, 3, 16, torch.float8_e4m3fn, "cpu")
    assert pool.cache.shape[-1] == of_token
    assert pool.cache.nbytes == 3 * page_bytes(groups, 16, 1)
