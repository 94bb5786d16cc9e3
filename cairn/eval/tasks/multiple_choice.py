"""Questions with several answers to choose from: the one that the model finds most likely is its choice.

acc         the largest log-likelihood
acc_norm    the largest log-likelihood per character, so that long answers are not at a disadvantage
"""

from collections.abc import Sequence
from typing import NamedTuple

from cairn.eval.intervals import share
from cairn.eval.requests import Likelihood, LogLikelihood, Result
from cairn.eval.tasks.task import EvaluatedSample, TaskScores


class AnswerChoice(NamedTuple):
    prompt: str
    choices: list[str]
    right: int  # which of them


class MultipleChoice:
    def __init__(self, name: str, questions: Sequence[AnswerChoice], delimiter: str = " ") -> None:
        """`delimiter` stands between a prompt and a choice."""
        self.name, self.questions = name, list(questions)
        self.requests = [
            LogLikelihood(question.prompt, f"{delimiter}{choice}")
            for question in questions
            for choice in question.choices
        ]

    def score(self, results: Sequence[Result]) -> TaskScores:
        found = iter(results)
        samples = [
            self._sample(question, [next(found) for _ in question.choices])
            for question in self.questions
        ]
        metrics = {
            name: share([sample.scores[name] for sample in samples]) for name in ("acc", "acc_norm")
        }
        return TaskScores(metrics=metrics, samples=samples)

    def _sample(self, question: AnswerChoice, results: Sequence[Result]) -> EvaluatedSample:
        logprobs = [result.logprob for result in results if isinstance(result, Likelihood)]
        per_character = [
            logprob / len(choice)
            for logprob, choice in zip(logprobs, question.choices, strict=True)
        ]
        chosen = largest(logprobs)
        scores = {
            "acc": float(chosen == question.right),
            "acc_norm": float(largest(per_character) == question.right),
        }
        return EvaluatedSample(
            prompt=question.prompt,
            expected=question.choices[question.right],
            answer=question.choices[chosen],
            scores=scores,
        )


def largest(values: Sequence[float]) -> int:
    """Index of the largest value; the first one on a tie."""
    return max(range(len(values)), key=lambda place: values[place])
