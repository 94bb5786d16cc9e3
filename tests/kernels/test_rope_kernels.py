"""Rotation, norms of heads and cache writes against transformers and our own model; and wrong arguments."""

import pytest
import torch

from cairn.kernels.accuracy import relative_error
from cairn.kernels.layer.rope import Heads, Pages, rope, rope_reference, rope_table
from cairn.kernels.layer.rope_backward import rope_backward
from cairn.kernels.paged.kv_write import rope_write
from cairn.models.rope import Rotation

T, H, K, C = 6, 4, 2, 16
FREQUENCIES = 10000.0 ** -(torch.arange(0, C, 2) / C)


def inputs(**norms):
    return torch.randn(T, (H + 2 * K) * C), Heads(H, K, **norms), rope_table(FREQUENCIES, 32)


def pages(slots=None, dtype=torch.float32, **scales):
    slots = torch.arange(T) if slots is None else slots
    return Pages(slots, *torch.zeros(2, 4, 4, K, C).to(dtype), **scales)


def test_table():
    table = rope_table(FREQUENCIES, 5, amplitude=2.0)
    angles = torch.arange(5.0)[:, None] * FREQUENCIES
    assert torch.equal(table, torch.cat((2 * angles.cos(), 2 * angles.sin()), dim=1))


def test_as_transformers_rotates():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    qkv, heads, table = inputs()
    positions = torch.tensor([3, 0, 31, 7, 7, 2])
    q, k, v = rope(qkv, heads, table, positions)
    cos, sin = table[positions].chunk(2, dim=-1)
    cos, sin = (torch.cat((one, one), dim=-1)[None] for one in (cos, sin))
    packed = qkv.view(1, T, H + 2 * K, C).transpose(1, 2)
    wanted = apply_rotary_pos_emb(packed[:, :H], packed[:, H : H + K], cos, sin)
    assert relative_error(q, wanted[0][0].transpose(0, 1)) < 1e-6
    assert relative_error(k, wanted[1][0].transpose(0, 1)) < 1e-6
    assert torch.equal(v, packed[0, H + K :].transpose(0, 1))


def test_as_our_model_rotates():
    qkv, heads, table = inputs()
    cos, sin = table[:T, None].chunk(2, dim=-1)
    rotate = Rotation(torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1))
    assert relative_error(rope(qkv, heads, table)[0], rotate(qkv.view(T, -1, C)[:, :H])) < 1e-6


def test_qk_norm_as_qwen3_has_it():
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    norm = Qwen3RMSNorm(C, eps=1e-6)
    norm.weight.data.normal_()
    qkv, heads, table = inputs(q_weight=norm.weight.data, k_weight=torch.ones(C))
    normed = torch.cat((norm(qkv.view(T, -1, C)[:, :H]).flatten(1), qkv[:, H * C :]), dim=1)
    plain = rope(normed.detach(), Heads(H, K), table)
    assert relative_error(rope(qkv, heads, table)[0], plain[0]) < 1e-6


def test_write_skips_slot_minus_one():
    qkv, heads, table = inputs()
    to = pages(torch.tensor([5, -1, 0, -1, 15, -1]))
    q = rope_write(qkv, heads, table, None, to)
    wanted_q, k, v = rope(qkv, heads, table)
    assert torch.equal(q, wanted_q)
    flat_k, flat_v = to.cache_k.view(16, K, C), to.cache_v.view(16, K, C)
    assert torch.equal(flat_k[[5, 0, 15]], k[[0, 2, 4]])
    assert torch.equal(flat_v[[5, 0, 15]], v[[0, 2, 4]])
    assert int(flat_k.any(dim=(-1, -2)).sum()) == 3


def test_gradients_of_the_reference():
    qkv, heads, table = inputs(q_weight=torch.randn(C), k_weight=torch.randn(C), plus_one=True)
    leaves = [one.double().requires_grad_() for one in (qkv, heads.q_weight, heads.k_weight)]
    wide = heads._replace(q_weight=leaves[1], k_weight=leaves[2])
    outputs = rope_reference(leaves[0], wide, table, None)
    grads = [torch.randn_like(one) for one in outputs]
    torch.autograd.backward(outputs, grads)
    found = rope_backward(*(grad.float() for grad in grads), qkv, heads, table)
    for one, leaf in zip(found, leaves, strict=True):
        assert relative_error(one, leaf.grad) < 1e-5


def bad(**changes):
    arguments = dict(zip(("qkv", "heads", "table"), inputs(), strict=True)) | changes
    return lambda: rope(**arguments)


def bad_write(to, **options):
    qkv, heads, table = inputs()
    return lambda: rope_write(qkv, heads, table, None, to, **options)


FP8, ONE = torch.float8_e4m3fn, torch.ones(1)
WRONG = {
    "qkv: wanted 8 heads of an even size": bad(qkv=torch.ones(T, 24)),
    "qkv: wanted shape [*, *]": bad(qkv=torch.ones(T, 8, C)),
    "table: wanted shape [*, 16]": bad(table=torch.ones(32, 8)),
    "table: wanted at least 6 rows": bad(table=torch.ones(5, C)),
    "positions: wanted shape [6]": bad(positions=torch.zeros(5).long()),
    "positions: wanted int64": bad(positions=torch.zeros(T)),
    "q_weight: wanted shape [16]": bad(heads=Heads(H, K, torch.ones(8), torch.ones(C))),
    "k_weight: wanted one with q_weight": bad(heads=Heads(H, K, torch.ones(C))),
    "slots: wanted shape [6]": bad_write(pages(torch.zeros(4).long())),
    "cache_v: wanted float32": bad_write(pages()._replace(cache_v=torch.zeros(4, 4, K, C).half())),
    "cache_k: wanted shape [*, *, 2, 16]": bad_write(
        pages()._replace(cache_k=torch.zeros(4, 4, 3, C))
    ),
    "v_scale: wanted one with k_scale": bad_write(pages(dtype=FP8, k_scale=ONE)),
    "k_scale: wanted none": bad_write(pages(k_scale=ONE, v_scale=ONE)),
    "k_scale: wanted 1 or 2 elements": bad_write(
        pages(dtype=FP8, k_scale=torch.ones(3), v_scale=ONE)
    ),
    "out: wanted none with in_place": bad_write(pages(), out=torch.ones(T, H, C), in_place=True),
    "out: wanted heads side by side": bad_write(pages(), out=torch.ones(T, C, H).transpose(1, 2)),
    "k_out: wanted shape [6, 2, 16]": bad_write(pages(), k_out=torch.ones(T, H, C)),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_argument_is_named(message):
    with pytest.raises(ValueError, match="^" + message.replace("[", r"\[").replace("*", r"\*")):
        WRONG[message]()
