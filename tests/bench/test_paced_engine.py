"""The engine that only keeps time: it answers everything, and its device's steps follow each other."""

from itertools import chain
from types import SimpleNamespace

import pytest

from cairn.bench import paced_engine
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step import Step


def test_every_request_gets_all_of_its_tokens():
    limits = Limits(rows=2, step_tokens=16, context=64, pages=16, page_size=16, vocabulary=9)
    engine = paced_engine.paced_engine(SimpleNamespace(tokenizer=None), limits, lambda step: 0.0)
    for number, tokens in enumerate((1, 5, 9)):
        engine.add(Request(number, [3] * 20, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    made = list(chain.from_iterable(iter(lambda: engine.step() if engine.has_work else None, None)))
    assert sum(len(one.tokens) for one in made) == 1 + 5 + 9
    assert sum(one.finished for one in made) == 3


@pytest.mark.parametrize(
    ("ahead_s", "due"), [(0.0, [11.0, 12.25, 21.0]), (0.5, [11.0, 12.0, 21.0])]
)
def test_a_step_that_could_have_been_launched_ahead_begins_where_the_last_one_ended(
    monkeypatch, ahead_s, due
):
    times = iter([10.0, 11.25, 20.0])
    monkeypatch.setattr(paced_engine.time, "monotonic", lambda: next(times))
    runner = paced_engine.PacedRunner([5], lambda step: 1.0, ahead_s)
    assert [runner.launch(Step(0))._due for _ in due] == due
