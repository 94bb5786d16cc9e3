"""Attention over packed sequences without kernels: the reference, what is refused, who is chosen, what it costs."""

import pytest
import torch
from attention_examples import Example, arguments, bounds, check_gradients, tensors
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import HardwareError
from cairn.kernels.accuracy import relative_error
from cairn.kernels.attention.attention import attention, attention_reference
from cairn.kernels.attention.attention_problem import cost, pairs
from cairn.kernels.attention.attention_rings import section_of
from cairn.models.attend import AttentionRule, PackedDocuments


def three(tokens=12, heads=4, kv_heads=2, width=64):
    return [torch.randn(tokens, n, width) for n in (heads, kv_heads, kv_heads)]


class TestReference:
    @pytest.mark.parametrize("window", [0, 5])
    @pytest.mark.parametrize("softcap", [0.0, 3.0])
    def test_agrees_with_the_model(self, window, softcap):
        lengths = [7, 1, 12]
        q, k, v = three(20)
        ours = attention(
            q,
            k,
            v,
            bounds((7, 1, 12), "cpu"),
            max_length=12,
            window=window,
            softcap=softcap,
            scale=0.2,
        )
        model = PackedDocuments(lengths)(q, k, v, AttentionRule(0, 0.2, window, softcap))
        assert relative_error(ours, model) < 1e-6

    def test_a_sink_takes_its_share(self):
        q, k, v = three(6)
        _, lse = attention_reference(q, k, v, None, max_length=6)
        sinks = torch.tensor([0.0, 1.0, -50.0, 2.0])
        out, with_sinks = attention_reference(q, k, v, None, max_length=6, sinks_H=sinks)
        plain = attention(q, k, v, None, max_length=6)
        share = torch.exp(lse - with_sinks).T[..., None]
        assert relative_error(out, plain * share) < 1e-6
        assert (
            relative_error(with_sinks, torch.logaddexp(lse, sinks[:, None].expand_as(lse))) < 1e-6
        )

    def test_who_sees_nothing_gets_nothing(self):
        example = Example((5, 3), (2, 4), behind=2)
        q, k, v = (x.nan_to_num() for x in tensors(example, torch.float32, "cpu"))
        out, lse = attention_reference(q, k, v, **arguments(example, "cpu"))
        blind = torch.tensor([True, True, True] + [False] * 5 + [True] * 2)
        assert not out[blind].any()
        assert torch.equal(lse == float("-inf"), blind.expand_as(lse))

    @pytest.mark.parametrize(
        "example", [Example((5, 0, 3), (2, 1, 4), sinks=True), Example((4, 3), (2, 5))], ids=str
    )
    def test_gradients_have_no_nan(self, example):
        check_gradients(example, torch.float64, "cpu", "reference", 1e-6)

    def test_out_is_filled(self):
        q, k, v = three()
        out = torch.empty_like(q)
        assert attention(q, k, v, None, max_length=6, out=out) is out
        assert torch.equal(out, attention(q, k, v, None, max_length=6))


WRONG = [
    (dict(q=torch.zeros(12, 4, 64, dtype=torch.int32)), "q: wanted float32"),
    (
        dict(q=torch.zeros(12, 4, 80), k=torch.zeros(12, 2, 80), v=torch.zeros(12, 2, 80)),
        "q: wanted heads of",
    ),
    (dict(q=torch.zeros(12, 64)), "q: wanted shape"),
    (dict(q=torch.zeros(12, 64, 4).transpose(1, 2)), "q: wanted stride 1"),
    (dict(k=torch.zeros(12, 3, 64)), "k: wanted heads that divide|v: wanted shape"),
    (dict(k=torch.zeros(12, 2, 64, dtype=torch.bfloat16)), "k: wanted float32"),
    (dict(k=torch.zeros(11, 2, 64), v=torch.zeros(11, 2, 64)), "k: wanted"),
    (dict(v=torch.zeros(12, 1, 64)), "v: wanted shape"),
    (dict(cu_seqlens=torch.tensor([0, 12])), "cu_seqlens: wanted int32"),
    (dict(cu_seqlens=torch.tensor([0], dtype=torch.int32)), "cu_seqlens: wanted at least 2"),
    (
        dict(cu_seqlens_k=torch.tensor([0, 6, 12], dtype=torch.int32)),
        "cu_seqlens_k: wanted None|shape",
    ),
    (dict(max_length=0), "max_length: wanted at least 1"),
    (dict(max_length=5), "q: wanted a multiple of 5 rows"),
    (dict(window=-1), "window: wanted 0"),
    (dict(window=3, causal=False), "window: wanted 0 where"),
    (dict(softcap=-1.0), "softcap: wanted 0"),
    (dict(scale=-1.0), "scale: wanted above 0"),
    (dict(sinks_H=torch.zeros(3)), "sinks: wanted shape"),
    (dict(out=torch.zeros(12, 2, 64)), "out: wanted shape"),
    (dict(out=torch.zeros(4, 12, 64).transpose(0, 1)), "out: wanted a contiguous"),
    (
        dict(q=torch.zeros(12, 4, 64, requires_grad=True), out=torch.zeros(12, 4, 64)),
        "out: wanted None",
    ),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[message for _, message in WRONG])
def test_wrong_arguments_are_named(change, message):
    q, k, v = three()
    named = dict(q_THC=q, k_TKC=k, v_TKC=v, cu_seqlens=None, max_length=6)
    places = dict(q="q_THC", k="k_TKC", v="v_TKC")
    named |= {places.get(name, name): value for name, value in change.items()}
    with pytest.raises(ValueError, match=message):
        attention(**named)


@pytest.mark.parametrize("impl", ["gluon", "torch", "triton"])
def test_a_gpu_is_needed_for_kernels(impl):
    with pytest.raises(HardwareError, match=f"attention cannot run as {impl}"):
        attention(*three(), None, max_length=6, impl=impl)


@given(st.integers(0, 40), st.integers(0, 40), st.booleans(), st.integers(0, 45))
def test_pairs_are_counted(queries, keys, causal, window):
    window = window if causal else 0
    position = [i + keys - queries for i in range(queries)]
    seen = sum(
        (not causal or j <= p) and (not window or j > p - window)
        for p in position
        for j in range(keys)
    )
    assert pairs(queries, keys, causal, window) == seen


def test_cost_is_what_the_formula_says():
    forward = cost([4096] * 4, 32, 8, 128)
    assert forward.flops == pytest.approx(4 * 4 * 32 * 128 * 4096 * 4097 / 2)
    assert forward.bytes == 16384 * (2 * 32 + 2 * 8) * 128 * 2 + 4 * 16384 * 32
    assert cost([4096] * 4, 32, 8, 128, backward=True).flops == 2.5 * forward.flops
    assert cost([(1, 4096)], 32, 8, 128).flops == 4 * 32 * 128 * 4096


@given(st.sampled_from([1, 4, 7, 8, 16]), st.sampled_from([64, 128]), st.integers(1, 200_000))
def test_sections_divide_the_heads(kv_heads, width, tokens):
    assert kv_heads % section_of(kv_heads, width, tokens) == 0


@pytest.mark.parametrize("causal", [True, False])
def test_no_keys_at_all(causal):
    q, none = torch.ones(4, 2, 64), torch.ones(0, 1, 64)
    out, lse = attention(
        q, none, none, None, max_length=2, max_length_k=0, causal=causal, return_lse=True
    )
    assert not out.any()
    assert (lse == -torch.inf).all()


def test_bounds_that_cannot_be_right_are_named():
    """By the reference, which reads them."""
    q = torch.ones(6, 2, 64)
    for wrong in ([0, 7], [0, 4, 3], [-1, 6], [0, 6]):
        cu = torch.tensor(wrong, dtype=torch.int32)
        with pytest.raises(ValueError, match=r"^cu_seqlens: wanted "):
            attention(q, q, q, cu, max_length=5)
