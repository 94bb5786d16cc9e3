"""Evaluation on a GPU: packed documents against one at a time, and against a CPU."""

import pytest
from shared_data import model_folder

from cairn.eval.local_model import LocalModel
from cairn.eval.requests import GenerateUntil, LogLikelihood, Rolling

pytestmark = pytest.mark.gpu
TEXT = "Once upon a time there was a little girl named Lily. She loved to play in the park. " * 8
PAIRS = [
    LogLikelihood("Once upon a time", f", there was a {word}") for word in ("girl", "dog", "car")
]


def scores(**options):
    with LocalModel(str(model_folder("stories15M")), max_length=128, **options) as model:
        likelihoods = [one.logprob for one in model.loglikelihood(PAIRS)]
        windows = model.rolling([Rolling(TEXT), Rolling(TEXT[:200])])
        sums = [sum(one.logprob for one in each) for each in windows]
        texts = model.generate_until([GenerateUntil("Once upon a time", ("Lily",), 24)] * 3)
        return likelihoods + sums, texts


def test_a_gpu_scores_as_a_cpu_whatever_the_batch():
    exact, texts = scores(device="cpu")
    packed, on_gpu = scores(device="cuda")
    few, again = scores(device="cuda", batch_tokens=1)
    assert packed == pytest.approx(exact, rel=0.02)  # bfloat16 against float32
    assert few == pytest.approx(packed, rel=0.01)
    assert texts == on_gpu == again
