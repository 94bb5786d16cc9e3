"""The Gluon attention kernels, emulated: what they compute, and that their barriers are right."""

import cairn.kernels.interpret  # isort: skip  # noqa: F401
import gluon_emulator  # isort: skip  # noqa: F401

import pytest
import torch
from attention_examples import Example, arguments, tensors

from cairn.kernels.accuracy import poison, relative_error
from cairn.kernels.attention import attention_gluon, attention_gluon_backward, attention_room
from cairn.kernels.attention.attention import attention_reference
from cairn.kernels.attention.attention_gluon_keys import STEP
from cairn.kernels.attention.attention_problem import checked_problem
from cairn.kernels.attention.attention_rings import TILE
from cairn.kernels.tuned import trying

EXAMPLES = [
    Example((300, 0, 1, 130, 64), heads=4, kv_heads=2, behind=5),
    Example((200, 70), heads=2, kv_heads=1, rules=dict(causal=False)),
    Example((150, 65), heads=4, kv_heads=4, sinks=True, fused=True),
]


@pytest.fixture(autouse=True)
def three_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for module in (attention_gluon, attention_gluon_backward):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 3)


def run(example, q, k, v, sinks, **rules):
    named = arguments(example, "cpu")
    problem = checked_problem(q, k, v, rules.pop("cu", named["cu_seqlens"]), None, named["max_length"], None,
                              named.get("causal", True), 0, 0.0, None)  # fmt: skip
    out, lse = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[1], q.shape[0])
    poison(out, lse)
    attention_gluon.attention_forward(q, k, v, sinks, problem, out, lse)
    return out, lse, problem


@pytest.mark.parametrize("ping_pong", [True, False])
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_forward(example, ping_pong):
    q, k, v, *sinks = tensors(example, torch.bfloat16, "cpu")
    key = attention_gluon.gluon_key(64, example.rules.get("causal", True), max(example.lengths))
    with trying("attention", key, dict(ping_pong=ping_pong)):
        out, lse, _ = run(example, q, k, v, sinks[0] if sinks else None)
    exact, exact_lse = attention_reference(
        *(x.double().nan_to_num() for x in (q, k, v)),
        **arguments(example, "cpu"),
        sinks_H=sinks[0].double() if sinks else None,
    )
    end = sum(example.lengths)
    assert relative_error(out[:end], exact[:end]) < 1e-2
    assert not out[end:].any()
    saw = exact_lse.isfinite()
    assert torch.equal(lse.isfinite(), saw)
    assert relative_error(lse[saw], exact_lse[saw]) < 1e-4


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("length", [256, 200])
def test_equal_lengths(width, length):
    """Tiles that are computed or looked up, rows that end with a block or within one."""
    example = Example((length, length), width=width)
    q, k, v = tensors(example, torch.bfloat16, "cpu")
    out, _, _ = run(example, q, k, v, None, cu=None)
    exact, _ = attention_reference(q.double(), k.double(), v.double(), None, max_length=length)
    assert relative_error(out, exact) < 1e-2


def test_no_sequence_sees_another():
    example = Example((150, 100))
    q, k, v = tensors(example, torch.bfloat16, "cpu")
    for x in (q, k, v):
        x[150:] = torch.nan
    out, lse, problem = run(example, q, k, v, None)
    alone, _ = attention_reference(q[:150], k[:150], v[:150], None, max_length=150)
    assert relative_error(out[:150], alone) < 1e-2
    dout = torch.randn_like(out)
    dout[150:] = torch.nan
    grads = attention_gluon_backward.attention_backward(
        dout, q, k, v, None, out, lse, None, problem
    )
    assert all(grad[:150].isfinite().all() for grad in grads[:3])


@pytest.mark.parametrize("example", [*EXAMPLES, Example((256, 256), width=128)], ids=str)
def test_backward(example):
    q, k, v, *sinks = (x.nan_to_num() for x in tensors(example, torch.bfloat16, "cpu"))
    equal = len(set(example.lengths)) == 1
    named = arguments(example, "cpu")
    wide = [x.double().requires_grad_() for x in (q, k, v, *sinks)]
    exact, exact_lse = attention_reference(*wide[:3], **named, sinks_H=wide[3] if sinks else None)
    problem = checked_problem(q, k, v, None if equal else named["cu_seqlens"], None, named["max_length"], None,
                              named.get("causal", True), 0, 0.0, None)  # fmt: skip
    dout, dlse = torch.randn_like(q), torch.randn(exact_lse.shape)
    saw = exact_lse.isfinite()
    truth = torch.autograd.grad([exact, exact_lse[saw]], wide, [dout.double(), dlse[saw].double()])
    grads = attention_gluon_backward.attention_backward(
        dout, q, k, v, sinks[0] if sinks else None, exact.detach().to(q.dtype), exact_lse.detach().float(),
        dlse, problem,
    )  # fmt: skip
    assert relative_error(grads[: len(truth)], truth) < 1e-2


@pytest.mark.parametrize(
    "example",
    [
        Example((384, 384), heads=4, kv_heads=2, width=128),
        Example((256, 256, 256), heads=2, kv_heads=2, rules=dict(causal=False)),
    ],
    ids=str,
)
def test_backward_with_slopes_kept(example):
    """The same gradients, and those of keys and values to the bit."""
    q, k, v = tensors(example, torch.bfloat16, "cpu")
    causal, length = example.rules.get("causal", True), example.lengths[0]
    out, lse, problem = run(example, q, k, v, None, cu=None)
    dout = torch.randn_like(q)
    key = attention_gluon_backward.backward_key(q.shape[2], causal, length)

    def gradients(slopes):
        with trying("attention", key, dict(slopes=slopes)):
            return attention_gluon_backward.attention_backward(
                dout, q, k, v, None, out, lse, None, problem
            )

    kept, usual = gradients(True), gradients(False)
    assert relative_error(kept[0], usual[0].float()) < 4e-3
    assert torch.equal(kept[1], usual[1])
    assert torch.equal(kept[2], usual[2])


def test_the_room_for_slopes_is_counted_in_the_kernels_blocks():
    assert (TILE.value, STEP.value) == (attention_room.TILE, attention_room.BLOCK)
    assert attention_room.slopes_bytes(512, 256, 3) == 2 * 3 * (4 + 3 + 2 + 1) * 64 * 64 * 2
    assert attention_room.slopes_bytes(512, 200, 3) == 0  # no whole tiles
    assert attention_room.slopes_bytes(1 << 20, 1 << 20, 8) == 0  # too much


def test_gradients_lie_side_by_side_as_the_projection_does():
    example = Example((256, 256), heads=4, kv_heads=2, width=128)
    q, k, v = tensors(example, torch.bfloat16, "cpu")
    out, lse, problem = run(example, q, k, v, None, cu=None)
    dq, dk, dv, _ = attention_gluon_backward.attention_backward(
        torch.randn_like(q), q, k, v, None, out, lse, None, problem
    )
    assert dq.stride() == dk.stride() == dv.stride() == (8 * 128, 128, 1)
    assert dk.data_ptr() - dq.data_ptr() == 4 * 128 * 2
    assert dv.data_ptr() - dk.data_ptr() == 2 * 128 * 2
