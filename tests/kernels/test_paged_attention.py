"""Attention over pages without a GPU: the reference against the model's own attention, and what is refused."""

import pytest
import torch

from cairn.core.errors import HardwareError
from cairn.kernels.attention.merge_state import State, merge_state
from cairn.kernels.cases.paged_attention import Shape, random_call
from cairn.kernels.paged.cascade import cascade_attention, parts_of, split_tables
from cairn.kernels.paged.paged_attention import (
    checked,
    cost,
    paged_attention,
    paged_attention_reference,
)
from cairn.kernels.paged.paged_views import matrix_view
from cairn.models.attend import AttentionRule, attention

WINDOWED = AttentionRule(layer=0, scale=0.2, window=9)


def call(queries=(5, 1, 20), lengths=(40, 17, 20), dtype=torch.float32, **rest):
    return random_call(Shape(queries, lengths, 4, 2, 32, **rest), "cpu", dtype)


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(layer=0, scale=0.2),
        WINDOWED,
        AttentionRule(layer=0, scale=0.2, window=9, softcap=2.0),
    ],
)
def test_reference_is_the_models_attention(rule):
    paged = call()._replace(scale=rule.scale, window=rule.window, softcap=rule.softcap)
    out_THC, _ = paged_attention_reference(paged)
    for sequence, rows in enumerate(out_THC.split([5, 1, 20])):
        length = int(paged.lengths[sequence])
        pages = paged.block_tables[sequence].long()
        keys, values = (
            cache[pages].flatten(0, 1)[:length] for cache in (paged.cache_k, paged.cache_v)
        )
        first = int(paged.starts[sequence])
        expected = attention(paged.q_THC[first : first + len(rows)], keys, values, rule)
        torch.testing.assert_close(rows, expected, rtol=1e-5, atol=1e-5)


def test_a_page_layout_is_a_matter_of_strides():
    apart = call(page=32)
    together = apart._replace(
        cache_k=apart.cache_k.transpose(1, 2).contiguous().transpose(1, 2),
        cache_v=apart.cache_v.transpose(1, 2).contiguous().transpose(1, 2),
    )
    for mine, yours in zip(
        paged_attention_reference(apart), paged_attention_reference(together), strict=True
    ):
        assert torch.equal(mine, yours)


def test_parts_of_the_keys_join_to_the_whole():
    """A prefix of 16 tokens (one page) and the rest: what cascade attention does."""
    whole = call([1, 1], [40, 17])
    out_THC, lse_TH = paged_attention_reference(whole)
    prefix = whole._replace(
        block_tables=whole.block_tables[:, :1], lengths=torch.tensor([16, 16]).int()
    )
    rest = whole._replace(block_tables=whole.block_tables[:, 1:], lengths=whole.lengths - 16)
    joined = merge_state(*(State(*paged_attention_reference(part)) for part in (prefix, rest)))
    torch.testing.assert_close(joined.out_THC, out_THC)
    torch.testing.assert_close(joined.lse_TH, lse_TH)


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_a_shared_prefix_in_parts_joins_to_the_whole(parts):
    whole = call([1, 7, 3], [33, 51, 40])
    whole.block_tables[:, :2] = whole.block_tables[:1, :2]
    shared_1 = torch.tensor([32], dtype=torch.int32)
    cascade = split_tables(whole.block_tables, whole.lengths, shared_1, 16, parts, 11)
    assert cascade.prefix_S.sum() == 32
    found = cascade_attention(*whole[:3], cascade, whole.starts, max_query=7)
    torch.testing.assert_close(found, paged_attention_reference(whole)[0], rtol=1e-5, atol=1e-5)


def test_few_queries_cut_a_prefix_into_more_parts():
    """So many that two programs of each multiprocessor have a tile; a power of two, to be joined two by two."""
    found = [
        parts_of(queries, heads=32, kv_heads=8) for queries in (1, 32, 64, 128, 256, 512, 9999)
    ]
    assert found == [8, 8, 8, 4, 2, 1, 1]
    whole = call([1, 7, 3], [33, 51, 40])
    with pytest.raises(ValueError, match="parts: wanted a power of two, got 3"):
        split_tables(whole.block_tables, whole.lengths, torch.ones(1, dtype=torch.int32), 16, 3)


def test_public_function_on_a_cpu_takes_the_reference():
    paged = call()
    out_THC, lse_TH = paged_attention_reference(paged)
    lse = torch.empty_like(lse_TH)
    found = paged_attention(*paged[:6], max_query=20, lse=lse)
    assert torch.equal(found, out_THC)
    assert torch.equal(lse, lse_TH)
    with pytest.raises(HardwareError, match="not on a GPU"):
        paged_attention(*paged[:6], max_query=20, impl="triton")


def test_padding_is_zero_and_minus_infinity():
    paged = call([1, 1], [0, 20])
    out_THC, lse_TH = paged_attention_reference(paged)
    assert (out_THC[0] == 0).all()
    assert (lse_TH[0] == -torch.inf).all()
    sinks = torch.randn(4)
    out_THC, lse_TH = paged_attention_reference(paged._replace(sinks_H=sinks))
    assert (out_THC[0] == 0).all()
    torch.testing.assert_close(lse_TH[0], sinks)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("q", {"q_THC": torch.zeros(26, 4, 33)}),
        ("q", {"q_THC": torch.zeros(26, 4, 32, dtype=torch.int32)}),
        ("q", {"q_THC": torch.zeros(26, 4, 64)[..., ::2]}),
        ("cache_k", {"q_THC": torch.zeros(26, 3, 32)}),
        ("cache_k", {"cache_k": torch.zeros(9, 17, 2, 32), "cache_v": torch.zeros(9, 17, 2, 32)}),
        ("cache_k", {"cache_k": torch.zeros(9, 16, 2, 32).bfloat16()}),
        ("cache_v", {"cache_v": torch.zeros(1, 16, 2, 32)}),
        ("k_scale", {"cache_k": torch.zeros(9, 16, 2, 32).bfloat16(), "k_scale": torch.ones(1)}),
        ("lengths", {"lengths": torch.zeros(3)}),
        ("block_tables", {"block_tables": torch.zeros(2, 4, dtype=torch.int32)}),
        ("cu_seqlens_q", {"starts": torch.zeros(3, dtype=torch.int32)}),
        ("cu_seqlens_q", {"starts": None}),
        ("max_query", {"max_query": 0}),
        ("window", {"window": -1}),
        ("softcap", {"softcap": -1.0}),
        ("scale", {"scale": 0.0}),
        ("sinks", {"sinks_H": torch.zeros(3)}),
        ("lse", {"lse": torch.zeros(26, 3)}),
        ("out", {"out": torch.zeros(26, 4, 33)}),
    ],
)
def test_wrong_arguments_are_named(name, change):
    paged = call()
    arguments = dict(zip(paged._fields[:7], paged[:7], strict=True))
    if name == "k_scale":
        arguments = {
            k: v.bfloat16() if k in ("q_THC", "cache_v") else v for k, v in arguments.items()
        }
        change = {"cache_k": arguments["cache_k"].bfloat16(), "k_scale": torch.ones(1)}
    with pytest.raises(ValueError, match=rf"^{name}: "):
        checked(**arguments | change)


def test_fp8_needs_both_scales():
    paged = call([1], [20], torch.bfloat16, fp8=True)
    with pytest.raises(ValueError, match=r"^v_scale: "):
        paged_attention(*paged[:6], max_query=1, k_scale=paged.k_scale)
    with pytest.raises(ValueError, match=r"^v_scale: "):
        paged_attention(*paged[:6], max_query=1, k_scale=paged.k_scale, v_scale=torch.ones(2))


def test_merging_refuses_what_does_not_fit():
    a = State(torch.zeros(3, 2, 16), torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"^b\.lse: "):
        merge_state(a, State(a.out_THC, torch.zeros(3, 1)))
    with pytest.raises(ValueError, match=r"^a\.out: "):
        merge_state(State(torch.zeros(3, 2, 32)[..., ::2], a.lse_TH), a)
    with pytest.raises(ValueError, match=r"^out\.out: "):
        merge_state(a, a, State(a.out_THC.bfloat16(), a.lse_TH))


def test_cache_as_a_matrix():
    """Row and column of every token's key are where the kernel's descriptor will look."""
    for by_head in (False, True):
        cache = call(page=32, by_head=by_head).cache_k
        view = matrix_view(cache)
        matrix = cache.as_strided((view.rows, view.columns), (cache.stride(1), 1))
        for page, token, head in ((0, 0, 0), (2, 31, 1), (1, 5, 1)):
            row = page * view.page_rows + head * view.head_rows + token
            column = head * view.head_columns
            assert torch.equal(matrix[row, column : column + 32], cache[page, token, head])


def test_cost():
    assert cost([1], [8192], 32, 8, 128) == (
        4 * 8192 * 32 * 128,
        2 * 8192 * 8 * 128 * 2 + 4 * 32 * 128,
    )
    windowed = cost([2], [100], 1, 1, 16, window=10)
    assert windowed.flops == 4 * 20 * 16
    assert windowed.bytes == 2 * 11 * 16 * 2 + 4 * 2 * 16
