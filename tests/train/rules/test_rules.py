"""Each rule's loss against an independent formula, and its slope against autograd of that formula."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import DataError
from cairn.train.rules import advantages as adv
from cairn.train.rules.cispo import CISPO
from cairn.train.rules.dpo import DPO
from cairn.train.rules.gspo import GSPO
from cairn.train.rules.ipo import IPO
from cairn.train.rules.kl import divergence
from cairn.train.rules.kto import KTO
from cairn.train.rules.kto import divergence as kto_divergence
from cairn.train.rules.on_policy import distillation_advantage
from cairn.train.rules.orpo import ORPO
from cairn.train.rules.pairs import Completions
from cairn.train.rules.policy import Clip, PolicyGradient, clipped, weigh
from cairn.train.rules.reward import reward_loss
from cairn.train.rules.simpo import SimPO
from cairn.train.rules.value import value_loss

P, L = 6, 9


def tokens(seed):
    """Log-probabilities [P, L] of completions of different lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    logp_PL = -torch.rand(P, L, generator=generator, dtype=torch.float64) * 3 - 0.05
    lengths_P = torch.randint(1, L + 1, (P,), generator=generator)
    return logp_PL, torch.arange(L)[None] < lengths_P[:, None]


def sigma(x):
    return 1 / (1 + torch.exp(-x))


def odds(x, m):
    mean = (x * m).sum(1) / m.sum(1)
    return torch.log(torch.exp(mean) / (1 - torch.exp(mean)))


def mean(x, m):
    return (x * m).sum(1) / m.sum(1)


PAIRS = {
    "dpo": (DPO(0.3), lambda c, r, fc, fr, m, n: -torch.log(
        sigma(0.3 * (((c - fc) * m).sum(1) - ((r - fr) * n).sum(1))))),
    "cdpo": (DPO(0.3, 0.2), lambda c, r, fc, fr, m, n: -0.8 * torch.log(
        sigma(0.3 * (((c - fc) * m).sum(1) - ((r - fr) * n).sum(1)))) - 0.2 * torch.log(
        sigma(-0.3 * (((c - fc) * m).sum(1) - ((r - fr) * n).sum(1))))),
    "ipo": (IPO(0.2), lambda c, r, fc, fr, m, n: (mean(c - fc, m) - mean(r - fr, n) - 2.5) ** 2),
    "simpo": (SimPO(2.0, 0.7), lambda c, r, fc, fr, m, n: -torch.log(
        sigma(2 * (mean(c, m) - mean(r, n)) - 0.7))),
    "orpo": (ORPO(0.4), lambda c, r, fc, fr, m, n: -mean(c, m) - 0.4 * torch.log(
        sigma(odds(c, m) - odds(r, n)))),
}  # fmt: skip


@pytest.mark.parametrize("name", PAIRS)
def test_pair_rules(name):
    rule, formula = PAIRS[name]
    (c, m), (r, n), (fc, _), (fr, _) = (tokens(seed) for seed in range(4))
    c.requires_grad_(), r.requires_grad_()
    expected_P = formula(c, r, fc, fr, m, n)
    gc, gr = torch.autograd.grad(expected_P.sum(), (c, r))
    made = [
        Completions((x.detach() * k).sum(1), k.sum(1), (f * k).sum(1))
        for x, k, f in ((c, m, fc), (r, n, fr))
    ]
    loss_P, slope_c, slope_r = rule(*made)
    torch.testing.assert_close(loss_P, expected_P.detach())
    torch.testing.assert_close(slope_c[:, None] * m, gc)
    torch.testing.assert_close(slope_r[:, None] * n, gr)


def test_kto():
    (x, m), (f, _), (x2, m2), (f2, _) = (tokens(seed) for seed in range(4))
    x.requires_grad_()
    good = torch.tensor([True, False, True, True, False, False])
    z = ((x2 - f2) * m2).sum(1).mean().clamp(min=0)
    gain = ((x - f) * m).sum(1)
    expected = torch.where(
        good, 1.5 * (1 - sigma(0.3 * (gain - z))), 0.7 * (1 - sigma(0.3 * (z - gain)))
    )
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    assert kto_divergence(((x2 - f2) * m2).sum(1)) == z
    loss, slope = KTO(0.3, 1.5, 0.7)(gain.detach(), good, z)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(slope[:, None] * m, gradient)


def test_reward_and_value():
    c, r, old, ret = (
        torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(s))
        for s in range(4)
    )
    c.requires_grad_(), r.requires_grad_()
    expected = -torch.log(sigma(c - r - 0.3)) + 0.1 * (c + r) ** 2
    grads = torch.autograd.grad(expected.sum(), (c, r))
    loss = reward_loss(c.detach(), r.detach(), 0.3, 0.1)
    torch.testing.assert_close(loss, type(loss)(expected.detach(), *grads))
    bound = torch.clamp(c, old - 0.2, old + 0.2)
    expected = 0.5 * torch.max((c - ret) ** 2, (bound - ret) ** 2)
    (gradient,) = torch.autograd.grad(expected.sum(), c)
    found, slope = value_loss(c.detach(), old, ret)
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(slope, gradient)


def streams(seed=0, size=400):
    g = torch.Generator().manual_seed(seed)
    x, old, ref, mu = (-torch.rand(size, generator=g) * 2 for _ in range(4))
    return x, {
        "old": old,
        "reference": ref,
        "behaviour": mu,
        "advantage": torch.randn(size, generator=g),
    }


def ppo(x, s, low, high, dual=0.0):
    r, a = torch.exp(x - s["old"]), s["advantage"]
    loss = torch.max(-r * a, -torch.clamp(r, 1 - low, 1 + high) * a)
    return torch.where(a < 0, torch.min(loss, -dual * a), loss) if dual else loss


def k3(x, s):
    return torch.exp(s["reference"] - x) - (s["reference"] - x) - 1


TOKEN_RULES = {
    "ppo": (PolicyGradient(), lambda x, s: ppo(x, s, 0.2, 0.2)),
    "dual clip": (PolicyGradient(Clip(0.2, 0.2, 1.3)), lambda x, s: ppo(x, s, 0.2, 0.2, 1.3)),
    "dapo": (PolicyGradient(Clip(0.2, 0.28)), lambda x, s: ppo(x, s, 0.2, 0.28)),
    "grpo": (PolicyGradient(kl=0.1), lambda x, s: ppo(x, s, 0.2, 0.2) + 0.1 * k3(x, s)),
    "k2": (
        PolicyGradient(kl=0.1, estimator="k2"),
        lambda x, s: ppo(x, s, 0.2, 0.2) + 0.05 * (s["reference"] - x) ** 2,
    ),
    "tis": (
        PolicyGradient(truncate=2.0),
        lambda x, s: torch.exp(s["old"] - s["behaviour"]).clamp(max=2) * ppo(x, s, 0.2, 0.2),
    ),
    "cispo": (
        CISPO(1.5),
        lambda x, s: -torch.exp(x - s["old"]).clamp(max=1.5).detach() * s["advantage"] * x,
    ),
}


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", TOKEN_RULES)
def test_token_rules(name, weighed):
    rule, formula = TOKEN_RULES[name]
    x, s = streams()
    if weighed:
        s["weight"] = torch.rand(len(x), generator=torch.Generator().manual_seed(9))
    x.requires_grad_()
    expected = formula(x, s) * s.get("weight", 1.0)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    loss, slope = rule(x.detach(), s)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(slope, gradient)


def test_gspo():
    (x, m), (old, _) = tokens(0), tokens(1)
    old = x + (old - x) * 1e-4
    x.requires_grad_()
    a = torch.tensor([1.0, -1, 0.5, 2, -0.5, 1], dtype=torch.float64)
    r = torch.exp(mean(x - old, m))
    expected = torch.max(-r * a, -torch.clamp(r, 1 - 3e-4, 1 + 4e-4) * a)
    (gradient,) = torch.autograd.grad(expected.sum(), x)
    loss, slope = GSPO()((x.detach() * m).sum(1), (old * m).sum(1), m.sum(1), a)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(slope[:, None] * m, gradient, rtol=1e-4, atol=1e-6)


def test_estimators_of_divergence():
    """Over many samples k1 and k3 estimate the divergence; k3 is never negative, k1 is."""
    g = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.3, 0.4, 0.3])
    drawn = torch.multinomial(p, 200_000, True, generator=g)
    true = (p * (p / q).log()).sum()
    values = {k: divergence(p.log()[drawn], q.log()[drawn], k)[0] for k in ("k1", "k2", "k3")}
    assert abs(values["k1"].mean() - true) < 3e-3
    assert abs(values["k3"].mean() - true) < 2e-3
    assert values["k3"].min() >= 0 > values["k1"].min()
    assert values["k3"].var() < values["k1"].var()


rewards = st.lists(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=4), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=50)
@given(rewards)
def test_group_advantages(table):
    r = torch.tensor(table)
    centred = r - r.mean(1, keepdim=True)
    torch.testing.assert_close(adv.group_advantages(r, "dr_grpo"), centred)
    torch.testing.assert_close(
        adv.group_advantages(r, "grpo"), centred / (r.std(1, keepdim=True) + 1e-4)
    )
    others = (r.sum(1, keepdim=True) - r) / 3
    torch.testing.assert_close(adv.group_advantages(r, "rloo"), r - others)
    assert adv.informative(r).tolist() == [len(set(row)) > 1 for row in table]


def test_unscored_answers_leave_their_group():
    r = torch.tensor([[1.0, 0.0, float("nan")], [float("nan")] * 3])
    assert adv.group_advantages(r, "dr_grpo").tolist() == [[0.5, -0.5, 0.0], [0.0, 0.0, 0.0]]
    assert adv.informative(r).tolist() == [True, False]
    with pytest.raises(DataError, match="infinite"):
        adv.group_advantages(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(DataError, match="shape"):
        adv.group_advantages(torch.zeros(2, 0))


def test_gae_is_the_discounted_sum_of_surprises():
    g = torch.Generator().manual_seed(3)
    reward, value = torch.randn(7, generator=g), torch.randn(7, generator=g)
    found, returns = adv.gae(reward, value, 0.9, 0.8)
    following = torch.cat([value[1:], torch.zeros(1)])
    surprise = reward + 0.9 * following - value
    expected = torch.stack(
        [sum(0.72 ** (k - t) * surprise[k] for k in range(t, 7)) for t in range(7)]
    )
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(returns, found + value)
    assert abs(float(adv.whitened(found).mean())) < 1e-6


def test_one_token_is_whitened_to_zero():
    """Its variance is not a number, which would spoil a whole step without a word."""
    assert adv.whitened(torch.tensor([3.0])).tolist() == [0.0]
    assert adv.whitened(torch.tensor([1.0, 3.0])).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_weights_make_the_named_means():
    lengths = torch.tensor([1, 3, 4])
    losses = [torch.rand(n) for n in lengths.tolist()]

    def total(kind):
        weights = weigh(kind, lengths, 10)
        return sum(w * x.sum() for w, x in zip(weights, losses, strict=True)) / 3

    torch.testing.assert_close(total("sequence"), torch.stack([x.mean() for x in losses]).mean())
    torch.testing.assert_close(total("token"), torch.cat(losses).mean())
    torch.testing.assert_close(total("constant"), torch.cat(losses).sum() / 30)
    for kind in ("sequence", "token", "constant"):  # of answers without a token of their own
        assert weigh(kind, torch.tensor([0, 0]), 10).isfinite().all()


def test_on_policy_the_slope_is_the_advantage():
    a = torch.randn(20)
    _, slope = clipped(torch.zeros(20), torch.zeros(20), a, Clip())
    torch.testing.assert_close(slope, -a)


def test_on_policy_distillation_follows_the_reverse_divergence():
    """Every token once, counted by its probability: the policy gradient is that of KL(student || teacher)."""
    scores_V = torch.randn(7, dtype=torch.float64, requires_grad=True)
    teacher_V = torch.randn(7, dtype=torch.float64).log_softmax(-1)
    logp_V = scores_V.log_softmax(-1)
    wanted = torch.autograd.grad(
        (logp_V.exp() * (logp_V - teacher_V)).sum(), scores_V, retain_graph=True
    )
    advantage_V = distillation_advantage(logp_V, teacher_V)
    old_V = logp_V.detach()
    _, slope_V = PolicyGradient()(old_V, {"old": old_V, "advantage": advantage_V})
    found = torch.autograd.grad((old_V.exp() * slope_V * logp_V).sum(), scores_V)
    torch.testing.assert_close(found[0].float(), wanted[0].float())
