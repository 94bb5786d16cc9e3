"""Perplexity of a text per token, word and byte.

    perplexity         exp(nats / tokens), of the tokens of this model: not comparable between tokenizers
    word_perplexity    exp(nats / words), words between white space
    byte_perplexity    exp(nats / bytes)
    bits_per_byte      nats / bytes / ln 2; comparable between all models

The windows are lm-eval's rolling ones, or, with a stride, the sliding ones of transformers' guide. The intervals come
from resampling documents; of a single document, its windows, for the metric per token.
"""

import math
import re
from collections.abc import Sequence

from cairn.core.errors import DataError
from cairn.eval.intervals import ScoreMetric, exponential, ratio
from cairn.eval.requests import Likelihood, Result, Rolling
from cairn.eval.tasks.task import EvaluatedSample, TaskScores

SHOWN = 200  # characters of a document in the report


class Perplexity:
    def __init__(self, name: str, texts: Sequence[str], window: int = 0, stride: int = 0) -> None:
        if not any(texts):
            raise DataError(f"{name} has no text", hint="a file with at least one character")
        self.name = name
        self.requests = [Rolling(text, window, stride) for text in texts]

    def score(self, results: Sequence[Result]) -> TaskScores:
        windows = [
            [one for one in result if isinstance(one, Likelihood)]
            for result in results
            if isinstance(result, list)
        ]
        if not any(one.tokens for found in windows for one in found):
            raise DataError(
                f"no token of {self.name} can be scored",
                hint="use a longer text, or leave out --stride, with which the first token only begins",
            )
        texts = [request.text for request in self.requests]
        nats = [-sum(one.logprob for one in found) for found in windows]
        words = [float(len(re.split(r"\s+", text))) for text in texts]
        sizes = [float(len(text.encode())) for text in texts]
        per_byte = ratio(nats, sizes)
        metrics = {
            "perplexity": exponential(_per_token(windows, nats)),
            "word_perplexity": exponential(ratio(nats, words)),
            "byte_perplexity": exponential(per_byte),
            "bits_per_byte": _scaled(per_byte, 1 / math.log(2)),
        }
        return TaskScores(metrics=metrics, samples=_samples(texts, windows, nats))


def _per_token(windows: Sequence[Sequence[Likelihood]], nats: Sequence[float]) -> ScoreMetric:
    if len(windows) > 1:
        return ratio(nats, [float(sum(one.tokens for one in found)) for found in windows])
    one = windows[0]
    return ratio([-each.logprob for each in one], [float(each.tokens) for each in one])


def _scaled(metric: ScoreMetric, factor: float) -> ScoreMetric:
    low, value, high = (factor * x for x in (metric.low, metric.value, metric.high))
    return ScoreMetric(value=value, low=low, high=high, method=metric.method)


def _samples(
    texts: Sequence[str], windows: Sequence[Sequence[Likelihood]], nats: Sequence[float]
) -> list[EvaluatedSample]:
    samples = []
    for text, found, total in zip(texts, windows, nats, strict=True):
        tokens = sum(one.tokens for one in found)
        scores = {"nats_per_token": total / tokens if tokens else 0.0, "tokens": float(tokens)}
        samples.append(EvaluatedSample(prompt=text[:SHOWN], expected="", answer="", scores=scores))
    return samples
