"""When a head drafts: decided by time, held against the time of the better way; answers are the same."""

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.serve.engine.speculate.head_pace import PATIENCE, PLAIN_STEPS, TRIAL_STEPS, HeadPace

PLAIN_S = 0.02


def served(pace: HeadPace, answers: int, length: float, drafted_s: float, passes_s: float) -> float:
    """Seconds for answers of 200 tokens each, one after another, where a verifying step brings so many."""
    spent = 0.0
    for _ in range(answers):
        request = object()
        pace.runs([request], [request])  # its prompt
        tokens = 0.0
        while tokens < 200:
            verified, runs = pace.verifies([request]), pace.runs([request], [])
            seconds = drafted_s if verified else PLAIN_S + (passes_s if runs else 0.0)
            gained = length if verified else 1.0
            pace.trial(1).note(verified, seconds, passes_s if runs else 0.0, gained)
            spent, tokens = spent + seconds, tokens + gained
        pace.finish(request)
    return spent


@settings(max_examples=20, deadline=None)
@given(length=st.floats(1.0, 4.0), ratio=st.floats(1.0, 4.0), passes=st.floats(0.0, 0.4))
def test_the_time_is_nearly_that_of_the_better_way(length, ratio, passes):
    answers, drafted_s = 20, PLAIN_S * (ratio + passes)
    found = served(HeadPace(), answers, length, drafted_s, PLAIN_S * passes)
    plain, drafted = answers * 200 * PLAIN_S, answers * 200 / length * drafted_s
    assert found <= 1.06 * min(plain, drafted)
    assert found <= 1.02 * plain


def test_a_head_that_does_not_pay_is_off_and_is_tried_again_with_a_later_request():
    pace = HeadPace()
    served(pace, 1, 1.2, 3 * PLAIN_S, 0.0)
    assert pace.trial(1).phase == "off"
    served(pace, PATIENCE // 200, 1.2, 3 * PLAIN_S, 0.0)
    assert pace.trial(1).phase != "off"
    running, new = object(), object()
    pace.trial(1).phase = "trial"
    assert not pace.runs([running], [])  # the head has not read its prompt
    assert not pace.verifies([running])
    assert pace.runs([running, new], [new])
    assert pace.verifies([new])


def test_other_numbers_of_requests_have_trials_of_their_own():
    pace = HeadPace()
    served(pace, 1, 1.2, 3 * PLAIN_S, 0.0)
    many = [object() for _ in range(8)]
    assert pace.runs(many, many)
    assert pace.trial(8).phase == "plain"


def test_answers_are_the_same_whatever_the_head_is_told():
    """A trial and its end lie within these answers; requests that begin and end meanwhile change the trial."""
    engine = tiny_engine("llama", speculate="random:eagle3", budget=24)
    assert engine.scheduler.speculation.pace is not None
    prompts = [prompt_of(n, seed=n) for n in (5, 40, 9, 17)]
    steps = PLAIN_STEPS + TRIAL_STEPS + 6
    requests = submit(engine, prompts[:2], max_tokens=steps)
    for _ in range(4):
        engine.step()
    requests += submit(engine, prompts[2:], max_tokens=steps)
    engine.run()
    assert [r.outputs for r in requests] == [greedy("llama", p, steps) for p in prompts]
    assert engine.scheduler.speculation.counts.runs > 0
    at_rest(engine)
