"""When a head drafts: decided by time, held against the time of the better way; answers are the same."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import at_rest, greedy, prompt_of, submit, tiny_engine

from cairn.serve.engine.speculate.guesses import GuessCosts, Trust, least_chances, worth_verifying
from cairn.serve.engine.speculate.head_pace import LEAST_STEPS, PATIENCE, PLAIN_STEPS, HeadPace
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds

PLAIN_S = 0.02
MOST = 4  # drafts


def head_pace(row: float) -> HeadPace:
    """`row`: what a further row of a step costs, in steps of one row."""
    return HeadPace(MeasuredSeconds(lambda tokens: 1 + row * (tokens - 1)), MOST)


def served(
    pace: HeadPace, answers: int, row: float, passes: float, chance: float, says: float
) -> float:
    """Seconds for answers of 200 tokens each; every guess has the same chance to hold, and what it `says`."""
    spent, drawn = 0.0, random.Random(1)
    for _ in range(answers):
        request = object()
        pace.runs([request], [request])  # its prompt
        tokens, made = 0.0, 0
        while tokens < 200:
            verifies = pace.verifies([request])
            count = pace.guesses(request, 1) if verifies else 0
            runs = pace.runs([request], [])
            if count:
                pace.launched(request, count)
            made = _passes(pace.least(1), says) if runs else 0
            head_s = PLAIN_S * passes * made
            seconds = PLAIN_S * (1 + row * count) + head_s
            chances = [says] * made + [0.0] * (MOST - made)
            pace.drafted([request] if runs else [], [chances] if runs else [], head_s)
            held = 0
            while held < count and drawn.random() < chance:
                held += 1
            if count:
                pace.landed(request, held)
            pace.seconds.note(1 + count, seconds - head_s)
            pace.trial(1).note(verifies, count > 0, seconds, head_s, 1.0 + held)
            spent, tokens = spent + seconds, tokens + 1 + held
        pace.finish(request)
    return spent


def _passes(least: list[float], chance: float) -> int:
    made = 1
    while made < MOST and chance**made >= least[made - 1]:
        made += 1
    return made


@settings(max_examples=10, deadline=None)
@given(
    chance=st.floats(0.0, 1.0),
    says=st.floats(0.0, 1.0),
    row=st.floats(0.05, 2.0),
    passes=st.floats(0.0, 0.2),
)
def test_the_time_is_nearly_that_of_the_better_way(chance, says, row, passes):
    """Of no drafts and of so many in every step, also where the head is too sure of itself."""
    answers = 8
    found = served(head_pace(row), answers, row, passes, chance, says)
    plain = answers * 200 * PLAIN_S
    lengths = [sum(chance**n for n in range(k + 1)) for k in range(1, MOST + 1)]
    steps = [1 + k * (row + passes) for k in range(1, MOST + 1)]
    assert found <= 1.05 * plain
    if says >= chance:
        assert (
            found
            <= 1.15
            * min(step / length for step, length in zip(steps, lengths, strict=True))
            * plain
        )


def test_as_many_guesses_are_verified_as_their_chances_are_worth():
    costs = GuessCosts(rate=60.0, steps_s=[0.018, 0.021, 0.024, 0.027], pass_s=0.001)
    assert worth_verifying([0.9, 0.8, 0.2], costs) == 2
    assert worth_verifying([0.1, 0.9, 0.9], costs) == 0  # the first has to hold as well
    assert worth_verifying([0.9, 0.0, 0.0], costs) == 1  # no more were made
    least = least_chances(costs, trust=1.0)
    assert len(least) == 2
    assert all(0.2 < chance < 0.5 for chance in least)
    uneven = costs._replace(
        steps_s=[0.018, 0.021, 0.030, 0.022]
    )  # three guesses cost less than two
    assert worth_verifying([0.9, 0.9, 0.9], uneven) == 3
    assert least_chances(uneven, 1.0)[0] < least[0]


def test_a_head_that_is_too_sure_of_itself_is_believed_less():
    trust = Trust()
    for _ in range(100):
        trust.note([0.8, 0.8], held=0)
    assert trust.factor < 0.2
    for _ in range(200):
        trust.note([0.8, 0.8], held=2)
    assert trust.factor > 1.0


def test_a_head_that_does_not_pay_is_off_and_is_tried_again_with_a_later_request():
    pace = head_pace(3.0)
    hopeless = dict(row=3.0, passes=0.1, chance=0.1, says=0.9)
    served(pace, 2, **hopeless)
    assert pace.trial(1).phase == "off"
    served(pace, PATIENCE // 200, **hopeless)
    running, new = object(), object()
    pace.trial(1).phase = "on"
    assert not pace.runs([running], [])  # the head has not read its prompt
    assert not pace.verifies([running])
    assert pace.runs([running, new], [new])
    assert pace.verifies([new])


def test_other_numbers_of_requests_have_trials_of_their_own():
    pace = head_pace(3.0)
    served(pace, 2, row=3.0, passes=0.1, chance=0.1, says=0.9)
    many = [object() for _ in range(8)]
    assert pace.runs(many, many)
    assert pace.trial(8).phase == "plain"


def test_answers_are_the_same_whatever_the_head_is_told():
    """A trial and its end lie within these answers; requests that begin and end meanwhile change the trial."""
    engine = tiny_engine("llama", speculate="random:eagle3", budget=24)
    assert engine.scheduler.speculation.pace is not None
    prompts = [prompt_of(n, seed=n) for n in (5, 40, 9, 17)]
    steps = PLAIN_STEPS + LEAST_STEPS + 6
    requests = submit(engine, prompts[:2], max_tokens=steps)
    for _ in range(4):
        engine.step()
    requests += submit(engine, prompts[2:], max_tokens=steps)
    engine.run()
    assert [r.outputs for r in requests] == [greedy("llama", p, steps) for p in prompts]
    assert engine.scheduler.speculation.counts.runs > 0
    at_rest(engine)
