"""A whole training step through our kernels, forward and backward, in the interpreter, beside the plain form."""

import cairn.kernels.interpret  # noqa: F401  # isort: skip
import msgspec
import pytest
import torch

from cairn.models.build import Build
from cairn.models.presets import preset
from cairn.models.weights import random_model
from cairn.train.data.batch import make_batch
from cairn.train.fused_forward import FusedTraining
from cairn.train.loss import NextToken
from cairn.train.parallel.alone import Alone
from cairn.train.products import PLAIN

SPEC = msgspec.structs.replace(
    preset("tiny-qwen3"), hidden=64, layers=1, heads=2, kv_heads=1, head_dim=64, intermediate=96,
    vocab=96,
)  # fmt: skip


def batch_of(lengths):
    tokens = torch.randint(SPEC.vocab, (sum(lengths),))
    return make_batch(tokens, tokens.roll(-1), lengths, [0])


def grads_of(parallel, batch, loss):
    total = parallel.forward_backward([batch], loss, torch.tensor(float(len(batch.tokens_T))))
    return total, parallel.gradients()


@pytest.mark.parametrize(("recompute", "lengths"), [("none", [16, 16]), ("selective", [20, 9])])
def test_gradients_equal_those_of_the_plain_form(recompute, lengths, monkeypatch):
    model = random_model(SPEC, Build("cpu", fused=True), seed=3)
    batch = batch_of(lengths)
    monkeypatch.setenv("CAIRN_KERNELS", "all=reference")
    expected, plain = grads_of(Alone(model), batch, NextToken(SPEC))
    expected_grads = {name: grad.clone() for name, grad in plain.items()}
    Alone(model).zero_grad()
    monkeypatch.delenv("CAIRN_KERNELS")
    form = FusedTraining(model, 64, PLAIN, recompute)
    found, grads = grads_of(Alone(model, form, form.attend), batch, NextToken(SPEC, fused=True))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=2e-3, atol=2e-4, msg=name)
