"""On-policy distillation (arXiv:2306.13649): the student samples, and each token's advantage is what the teacher says.

    advantage = log teacher - log student        its mean over the student's own tokens is -KL(student || teacher)

Fed to `rules.policy.PolicyGradient`, whose ratio corrects samples of an older student.
"""

from torch import Tensor

from cairn.train.rules.kl import LARGEST


def distillation_advantage(student_T: Tensor, teacher_T: Tensor) -> Tensor:
    """Of each sampled token, from the log-probabilities of both; without a gradient."""
    return (teacher_T - student_T).detach().clamp(-LARGEST, LARGEST)
