"""Distillation on policy (arXiv:2306.13649): the student samples, the teacher's log ratio is the advantage.

    advantage = log teacher - log student        its mean over the student's own tokens is -KL(student || teacher)

Fed to `rules.policy.PolicyGradient`, whose ratio corrects samples of an older student.
"""

from torch import Tensor

from cairn.train.rules.kl import LARGEST


def distillation_advantage(student_T: Tensor, teacher_T: Tensor) -> Tensor:
    """Advantage of each sampled token from both log probabilities, without a gradient."""
    return (teacher_T - student_T).detach().clamp(-LARGEST, LARGEST)
