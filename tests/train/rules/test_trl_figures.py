"""Losses and gradients that TRL 1.16 computes for the same log-probabilities, as constants of one run of it."""

import pytest
import torch

from cairn.train.rules.cispo import CISPO
from cairn.train.rules.gspo import GSPO
from cairn.train.rules.orpo import ORPO
from cairn.train.rules.pairs import Completions
from cairn.train.rules.policy import Clip, PolicyGradient, weigh

S, T, LONGEST = 4, 5, 8
AT_ST = torch.arange(S * T, dtype=torch.float32).view(S, T)
LOGP_ST = -1.0 - 0.6 * torch.sin(1.3 * AT_ST)
OLD_ST = LOGP_ST + 0.5 * torch.cos(2.1 * AT_ST)
REFERENCE_ST = LOGP_ST + 0.3 * torch.sin(0.7 * AT_ST)
TOKENS_S = torch.tensor([5, 3, 4, 2])
THERE_ST = torch.arange(T)[None] < TOKENS_S[:, None]
ADVANTAGE_S = torch.tensor([0.8, -1.1, 0.3, -0.4])

TRL = {
    "grpo": (
        0.1445636,
        [
            -0.0242612,
            0.0,
            0.0,
            -0.0242629,
            0.0,
            0.1162714,
            0.0,
            0.1196954,
            0.0,
            0.0,
            0.0,
            0.0,
            -0.0113853,
            0.0,
            0.0,
            0.0,
            0.0666728,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "grpo_kl": (
        0.1473262,
        [
            -0.0242612,
            -0.001066,
            -0.0017199,
            -0.0257409,
            -0.0005286,
            0.1171038,
            0.0019174,
            0.1218227,
            0.0,
            0.0,
            -0.0013616,
            -0.0021567,
            -0.0132118,
            -0.0006279,
            0.0,
            0.0028995,
            0.0698546,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "dr_grpo": (
        -0.0171145,
        [
            -0.0151633,
            0.0,
            0.0,
            -0.0151643,
            0.0,
            0.0436018,
            0.0,
            0.0448858,
            0.0,
            0.0,
            0.0,
            0.0,
            -0.0056927,
            0.0,
            0.0,
            0.0,
            0.0166682,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "dapo": (
        -0.0571987,
        [
            -0.0346589,
            0.0,
            -0.0730165,
            -0.0346613,
            0.0,
            0.0996612,
            0.0,
            0.1025961,
            0.0,
            0.0,
            0.0,
            -0.0267777,
            -0.0130118,
            0.0,
            -0.0,
            0.0,
            0.0380988,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "cispo": (
        0.0118396,
        [
            -0.0346589,
            -0.0735509,
            -0.0730165,
            -0.0346613,
            -0.0740839,
            0.0996612,
            0.0476695,
            0.1025961,
            0.0,
            0.0,
            -0.0281794,
            -0.0267777,
            -0.0130118,
            -0.0283772,
            -0.0,
            0.0173601,
            0.0380988,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "gspo": (
        0.1004216,
        [
            -0.0381045,
            -0.0381045,
            -0.0381045,
            -0.0381045,
            -0.0381045,
            0.0918148,
            0.0918148,
            0.0918148,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
            0.0,
        ],
    ),
    "orpo": ([0.2477976, 0.2383013], [-0.2941157, -0.2462003, 0.2785792, 0.2338282]),
}


def by_token(rule, mean):
    """Loss and gradient [S, T] of a token rule, with the divisor that `mean` names."""
    weight_S = weigh(mean, TOKENS_S, LONGEST)
    streams = {
        "old": OLD_ST[THERE_ST],
        "reference": REFERENCE_ST[THERE_ST],
        "advantage": ADVANTAGE_S[:, None].expand(S, T)[THERE_ST],
        "weight": weight_S[:, None].expand(S, T)[THERE_ST],
    }
    loss_T, slope_T = rule(LOGP_ST[THERE_ST], streams)
    gradient_ST = torch.zeros(S, T)
    gradient_ST[THERE_ST] = slope_T / S
    return float(loss_T.sum()) / S, gradient_ST


POLICIES = {
    "grpo": (PolicyGradient(), "sequence"),
    "grpo_kl": (PolicyGradient(kl=0.1), "sequence"),
    "dr_grpo": (PolicyGradient(), "constant"),
    "dapo": (PolicyGradient(Clip(0.2, 0.28)), "token"),
    "cispo": (CISPO(1.4), "token"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies(name):
    loss, gradient_ST = by_token(*POLICIES[name])
    wanted, slopes = TRL[name]
    assert loss == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(gradient_ST.flatten(), torch.tensor(slopes), atol=1e-6, rtol=1e-5)


def sums(values_ST):
    return (values_ST * THERE_ST).sum(1)


def test_gspo():
    rule = GSPO(Clip(0.05, 0.06))
    loss_S, slope_S = rule(sums(LOGP_ST), sums(OLD_ST), TOKENS_S.float(), ADVANTAGE_S)
    wanted, slopes = TRL["gspo"]
    assert float(loss_S.mean()) == pytest.approx(wanted, abs=1e-6)
    gradient_ST = torch.where(THERE_ST, slope_S[:, None] / S, 0.0)
    torch.testing.assert_close(gradient_ST.flatten(), torch.tensor(slopes), atol=1e-6, rtol=1e-5)


def sides():
    """The first two sequences were chosen, the last two rejected."""
    parts = (slice(0, 2), slice(2, 4))
    columns = (sums(LOGP_ST), TOKENS_S.float(), sums(REFERENCE_ST))
    return [Completions(*(column[part] for column in columns)) for part in parts]


def test_orpo():
    """The part of the odds, to which the cross entropy of the chosen answer is added."""
    chosen, rejected = sides()
    orpo = ORPO(0.4)(chosen, rejected)
    losses, slopes = TRL["orpo"]
    assert (orpo.loss_P + chosen.mean_P).tolist() == pytest.approx(losses, abs=1e-5)
    by_mean = torch.cat([orpo.chosen_P * chosen.tokens_P + 1, orpo.rejected_P * rejected.tokens_P])
    assert by_mean.tolist() == pytest.approx(slopes, abs=1e-5)
