"""Requests of a task to a model and their results: the three request types of lm-eval. No torch.

LogLikelihood    how likely is `continuation` after `context`, and would greedy decoding have written it?
Rolling          how likely is a whole text, in windows that fit into the context of the model?
GenerateUntil    what does the model write after `context`, up to a stop string?
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

MAX_TOKENS = 256  # of an answer, lm-eval's default


class LogLikelihood(NamedTuple):
    context: str
    continuation: str


class Rolling(NamedTuple):
    text: str
    window: int = 0  # tokens the model sees at once; 0: its context
    # Tokens from one window to the next, as transformers' guide has it; 0: lm-eval's windows.
    stride: int = 0


class GenerateUntil(NamedTuple):
    context: str
    until: tuple[str, ...] = ()
    max_tokens: int = MAX_TOKENS
    chat: bool = False  # whether `context` is a message of a user, to be put into the chat template


class Likelihood(NamedTuple):
    logprob: float  # in nats, the sum over `tokens`
    tokens: int
    greedy: bool  # whether each token was the most likely one


Request = LogLikelihood | Rolling | GenerateUntil
# Of a LogLikelihood, of each window of a Rolling, of a GenerateUntil.
Result = Likelihood | list[Likelihood] | str


class ProgressCallback(Protocol):
    def __call__(self, count: float = 1) -> None: ...


class EvaluatedModel(Protocol):
    """Interface of a model under evaluation; `LocalModel` implements it."""

    name: str

    def loglikelihood(
        self, requests: Sequence[LogLikelihood], advance: ProgressCallback
    ) -> list[Likelihood]: ...

    def rolling(
        self, requests: Sequence[Rolling], advance: ProgressCallback
    ) -> list[list[Likelihood]]: ...

    def generate_until(
        self, requests: Sequence[GenerateUntil], advance: ProgressCallback
    ) -> list[str]: ...


def silent(count: float = 1) -> None:
    """An `ProgressCallback` that is not shown."""
