"""Identity preference optimisation (arXiv:2310.12036): (d - 1 / (2 beta))^2, where d is made of means over tokens."""

from cairn.train.rules.pairs import Completions, PairLoss


class IPO:
    needs_reference = True
    per_token = True

    def __init__(self, beta: float = 0.1) -> None:
        self.beta = beta

    def __call__(self, chosen: Completions, rejected: Completions) -> PairLoss:
        difference_P = chosen.gain_P / chosen.tokens_P - rejected.gain_P / rejected.tokens_P
        error_P = difference_P - 1 / (2 * self.beta)
        return PairLoss(
            error_P.square(), 2 * error_P / chosen.tokens_P, -2 * error_P / rejected.tokens_P
        )
