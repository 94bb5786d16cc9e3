"""Cairn under lm-eval's harness; only where that package is installed."""

import pytest
from shared_data import model_folder

pytest.importorskip("lm_eval", reason="needs lm_eval (pip install lm-eval)")


def test_the_harness_gets_what_the_model_says():
    from lm_eval.api.instance import Instance

    from cairn.eval.lm_eval_adapter import CairnLM
    from cairn.eval.requests import LogLikelihood, Rolling

    lm = CairnLM(str(model_folder("stories15M")), device="cpu", batch_size=4)

    def asked(kind, *arguments):
        return [Instance(kind, {}, arguments, 0)]

    pair = ("Once upon a time", ", there was")
    (found,) = lm.loglikelihood(asked("loglikelihood", *pair))
    expected = lm.model.loglikelihood([LogLikelihood(*pair)])[0]
    assert found == (expected.logprob, expected.greedy)
    rolling = lm.loglikelihood_rolling(asked("loglikelihood_rolling", "One day a dog ran."))
    windows = lm.model.rolling([Rolling("One day a dog ran.")])[0]
    assert rolling == [sum(one.logprob for one in windows)]
    options = {"until": ["Lily"], "do_sample": False, "max_gen_toks": 12}
    assert lm.generate_until(asked("generate_until", pair[0], options)) == [
        ", there was a little girl named "
    ]
    lm.model.close()
