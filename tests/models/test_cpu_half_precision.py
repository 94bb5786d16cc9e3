"""A CPU without products of 16-bit floats computes them in float32 and rounds once."""

import pytest
import tiny_whisper
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.hw import cpu_types
from cairn.models.cpu_half_precision import Conv1d, attention, einsum, linear, matmul
from cairn.models.speech.load import open_whisper
from cairn.models.text_to_text.load import load_t5
from cairn.models.text_to_text.model import DecodedTokens

BF16, F16 = torch.bfloat16, torch.float16
STEP = {BF16: 2**-8, F16: 2**-11}  # the largest relative error of one rounding
both = pytest.mark.parametrize("dtype", [BF16, F16])


@pytest.fixture
def without(monkeypatch):
    monkeypatch.setattr(cpu_types, "cpu_features", frozenset)


def numbers(*shape, dtype=BF16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rounded_once(found, exact, dtype):
    assert found.dtype == dtype
    assert ((found.double() - exact).abs() <= exact.abs() * STEP[dtype] + 1e-5).all()


@both
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_is_rounded_once(without, biased, dtype):
    x, w, bias = (
        numbers(*size, dtype=dtype, seed=len(size)) for size in ((5, 64), (48, 64), (48,))
    )
    exact = x.double() @ w.double().t() + (bias.double() if biased else 0)
    assert_rounded_once(linear(x, w, bias if biased else None), exact, dtype)


@both
def test_products_in_batches_are_rounded_once(without, dtype):
    a, b = numbers(3, 5, 64, dtype=dtype), numbers(3, 64, 7, dtype=dtype, seed=1)
    exact = a.double() @ b.double()
    assert_rounded_once(matmul(a, b), exact, dtype)
    assert_rounded_once(einsum("bmk,bkn->bmn", a, b), exact, dtype)


@both
@pytest.mark.parametrize("mask", ["causal", "added", "boolean"])
def test_attention_is_rounded_once(without, mask, dtype):
    q, k, v = (numbers(1, 4, 9, 32, dtype=dtype, seed=seed) for seed in range(3))
    visible = torch.ones(9, 9, dtype=torch.bool).tril()
    hidden = torch.zeros(9, 9).masked_fill(~visible, -torch.inf)
    how = {"is_causal": True}
    if mask != "causal":
        how = {"attn_mask": visible if mask == "boolean" else hidden.to(dtype)}
    scores = q.double() @ k.double().transpose(-1, -2) / 32**0.5 + hidden
    assert_rounded_once(attention(q, k, v, **how), scores.softmax(-1) @ v.double(), dtype)


@both
def test_gradients_have_the_type_of_what_they_are_of(without, dtype):
    x, w = (numbers(n, 64, dtype=dtype, seed=n).requires_grad_() for n in (5, 48))
    linear(x, w).sum().backward()
    assert (x.grad.dtype, w.grad.dtype) == (dtype, dtype)
    torch.testing.assert_close(x.grad[0], w.detach().double().sum(0).to(dtype))


def test_other_types_are_torchs(without):
    x, w = numbers(5, 64, dtype=torch.float32), numbers(48, 64, dtype=torch.float32, seed=1)
    assert torch.equal(linear(x, w), torch.nn.functional.linear(x, w))


@both
def test_a_convolution_is_rounded_once(without, dtype):
    layer = Conv1d(12, 8, 3, stride=2, padding=1).to(dtype)
    x = numbers(2, 12, 30, dtype=dtype)
    how = {"stride": 2, "padding": 1}
    exact = torch.nn.functional.conv1d(
        x.double(), layer.weight.double(), layer.bias.double(), **how
    )
    assert_rounded_once(layer(x), exact, dtype)


class NoSlowProducts(TorchDispatchMode):
    """Refuses what torch would multiply one number after the other."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        name = operation.__name__.partition(".")[0]
        if any(part in name for part in ("mm", "conv", "linear", "attention", "baddbmm")):
            given = [one for one in args if isinstance(one, torch.Tensor)]
            assert all(one.dtype not in STEP for one in given), name
        return operation(*args, **(kwargs or {}))


def whisper_logits(folder, dtype):
    model = open_whisper("tiny", folder).load("cpu", dtype)
    tokens = torch.arange(24).view(2, 12)
    mel = torch.randn(2, 80, 3000, generator=torch.Generator().manual_seed(1))
    return model.read(tokens, model.texts(2), model.listen(mel))


def t5_logits(folder, dtype):
    model = load_t5(folder, dtype=dtype)
    return model.read(torch.arange(9), DecodedTokens(), model.remember(torch.arange(2, 40)))


def saved_t5(folder):
    torch.manual_seed(1)
    sizes = dict(vocab_size=97, d_model=32, d_kv=12, d_ff=48, num_layers=2, num_heads=3)
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
    return folder


@both
@pytest.mark.parametrize("kind", ["whisper", "t5"])
def test_models_that_are_no_decoders_go_the_same_way(without, kind, dtype, tmp_path):
    """Whisper and T5: no product in 16 bits is left to torch, and the logits are those of float32 but for rounding."""
    if kind == "whisper":
        folder, logits = tiny_whisper.save(tmp_path, tiny_whisper.reference()), whisper_logits
    else:
        folder, logits = saved_t5(tmp_path), t5_logits
    with torch.inference_mode():
        exact = logits(folder, torch.float32)
        with NoSlowProducts():
            found = logits(folder, dtype)
    assert (found - exact).norm() <= 20 * STEP[dtype] * exact.norm()
