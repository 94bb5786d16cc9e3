"""Forms of the loss against each other and against torch, with gradients."""

import msgspec
import pytest
import torch
import torch.nn.functional as F

from cairn.models.build import ModelBuild
from cairn.models.linear.maps import Vocabulary
from cairn.models.presets import preset
from cairn.train.data.batch import IGNORED, make_batch
from cairn.train.objective import NextToken, Objective, token_losses, valid_tokens


def problem(tokens=37, vocab=50, width=16):
    vocabulary = Vocabulary(ModelBuild("cpu"), vocab, width)
    vocabulary.weight.data.normal_()
    hidden = torch.randn(tokens, width, requires_grad=True)
    targets = torch.randint(vocab, (tokens,))
    targets[::5] = IGNORED
    batch = make_batch(torch.zeros(tokens, dtype=torch.long), targets, [tokens], [0])
    return vocabulary, hidden, batch


def run(loss, vocabulary, hidden, batch, valid):
    value = loss(hidden, vocabulary, batch, torch.tensor(float(valid)))
    return value.detach(), *torch.autograd.grad(value, (hidden, vocabulary.weight))


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_every_form_gives_the_same(z_loss, softcap):
    spec = msgspec.structs.replace(preset("tiny-qwen3"), logit_softcap=softcap)
    vocabulary, hidden, batch = problem()
    valid = int(valid_tokens([batch.targets_T], "cpu"))
    logits = hidden @ vocabulary.weight.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    value = F.cross_entropy(logits, batch.targets_T, ignore_index=IGNORED)
    if z_loss:
        value = value + z_loss * logits.logsumexp(-1).square()[batch.targets_T != IGNORED].mean()
    expected = value.detach(), *torch.autograd.grad(value, (hidden, vocabulary.weight))
    for loss in (
        Objective(spec, NextToken(z_loss)),
        Objective(spec, NextToken(z_loss), chunk=10),
        Objective(spec, NextToken(z_loss), fused=True),
    ):
        for found, wanted in zip(
            run(loss, vocabulary, hidden, batch, valid), expected, strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


class Ratio:
    """Importance-weighted REINFORCE: a loss that is not linear in the log-probability, with two streams."""

    is_cross_entropy = False

    def __init__(self, z_loss=0.0):
        self.z_loss = z_loss

    def __call__(self, logp_T, streams):
        loss_T = -(logp_T - streams["old"]).exp() * streams["advantage"]
        return loss_T, loss_T  # it is its own derivative


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_another_rule_has_the_gradients_of_autograd(z_loss):
    """In float64, plain, in chunks and through the form that the kernel follows."""
    vocabulary, hidden, batch = problem()
    vocabulary.double()
    hidden = hidden.detach().double().requires_grad_()
    tokens = len(batch.tokens_T)
    old_T, advantage_T = torch.randn(2, tokens, dtype=torch.float64).sub(torch.tensor(2.0)).unbind()
    batch = batch._replace(extra={"old": old_T, "advantage": advantage_T})
    counts_T = batch.targets_T != IGNORED
    logp_TV = (hidden @ vocabulary.weight.t()).log_softmax(-1)
    lse_T = (hidden @ vocabulary.weight.t()).logsumexp(-1)
    logp_T = logp_TV.gather(1, batch.targets_T.clamp(min=0)[:, None])[:, 0]
    value = (-(logp_T - old_T).exp() * advantage_T)[counts_T].sum() / 7
    value = value + z_loss * lse_T[counts_T].square().sum() / 7
    expected = value.detach(), *torch.autograd.grad(value, (hidden, vocabulary.weight))
    spec = preset("tiny-qwen3")
    rule = Ratio(z_loss)
    for loss in (
        Objective(spec, rule),
        Objective(spec, rule, chunk=10),
        Objective(spec, rule, True),
    ):
        found = run(loss, vocabulary, hidden, batch, 7)
        for mine, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mine.double(), wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_chunks_add_up_gradients_of_16_bits_in_float32(softcap):
    """128 of them: as near to float64 as one chunk, where sums of 16 bits were five times as far."""
    torch.manual_seed(2)
    spec = msgspec.structs.replace(preset("tiny-qwen3"), logit_softcap=softcap)
    vocabulary, hidden, batch = problem(tokens=512, vocab=90)
    vocabulary.bfloat16()
    hidden = hidden.detach().bfloat16().requires_grad_()
    exact_V = vocabulary.weight.detach().double().requires_grad_()
    logits = hidden.detach().double() @ exact_V.t()
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    F.cross_entropy(logits, batch.targets_T, ignore_index=IGNORED, reduction="sum").backward()
    errors = []
    for chunk in (512, 4):
        _, _, gradient = run(Objective(spec, chunk=chunk), vocabulary, hidden, batch, 1)
        errors.append((gradient.double() - exact_V.grad).norm() / exact_V.grad.norm())
    assert errors[1] < 1.5 * errors[0]


def test_tokens_without_a_target_have_neither_loss_nor_gradient():
    vocabulary, hidden, batch = problem()
    _, grad, _ = run(Objective(preset("tiny-qwen3"), NextToken(1e-2)), vocabulary, hidden, batch, 1)
    assert grad[::5].abs().max() == 0
    assert token_losses(hidden @ vocabulary.weight.t(), batch.targets_T, z_loss=1.0)[::5].max() == 0
