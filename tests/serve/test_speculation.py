"""Several tokens in one step: whatever a drafter proposes, every request gets what it gets without one.

The drafter knows the answers of a run without drafts and tells them with some accuracy; so drafts are accepted whole,
in part and not at all, in one batch with prompts and with requests of every kind.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from noisy_drafter import NoisyDrafter
from tiny_engines import (
    VOCABULARY,
    all_logits,
    at_rest,
    greedy,
    model,
    prompt_of,
    submit,
    tiny_engine,
)

from cairn.core.errors import RequestError
from cairn.serve.answer import Answer
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.drafter import accepted
from cairn.serve.engine.speculate.row_costs import row_costs
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds

FAMILY = "qwen3"
SHARED = prompt_of(37, seed=1)
ACCURACIES = (0.0, 0.5, 0.9, 1.0)


class EveryThird:
    """A grammar: the n-th token is n modulo 3, and 40 tokens end the text."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    @property
    def finished(self) -> bool:
        return self.count >= 40

    def mask(self) -> np.ndarray:
        bits = np.zeros(32 * -(-VOCABULARY // 32), dtype=np.uint8)
        bits[self.count % 3 : VOCABULARY : 3] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token: int) -> str | None:
        if token % 3 != self.count % 3:
            return f"token {token} at {self.count}"
        self.count += 1
        return None

    def forced(self) -> list[int]:
        return []

    def followed(self, tokens: Sequence[int]) -> int:
        wrong = (n for n, token in enumerate(tokens) if token % 3 != (self.count + n) % 3)
        return next(wrong, len(tokens))

    def copy(self) -> "EveryThird":
        return EveryThird(self.count)


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seed": dict(temperature=1.2, seed=7),
    "cut": dict(temperature=1.0, top_k=20, top_p=0.9, seed=8),
    "penalties": dict(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6),
    "penalties and seed": dict(temperature=0.9, seed=3, frequency_penalty=0.8),
    "bias": dict(logit_bias={3: 4.0, 9: -50.0}),
    "least": dict(min_tokens=9, stop_token_ids=list(range(0, VOCABULARY, 2))),
    "stop": dict(stop_token_ids=list(range(0, VOCABULARY, 7))),
    "logprobs": dict(logprobs=3, temperature=1.0, seed=1),
    "prompt": dict(prompt_logprobs=1, logprobs=0),
    "short": dict(max_tokens=2),
    "one": dict(max_tokens=1),
}


def questions() -> list[tuple[list[int], dict[str, Any], bool]]:
    """Prompt, parameters, with a grammar or not."""
    several = [(prompt_of(5 + 3 * i, seed=i), kind, False) for i, kind in enumerate(KINDS.values())]
    several += [([*SHARED, i], KINDS["seed"] | {"seed": i}, False) for i in range(2)]
    several += [(SHARED, {}, True), (prompt_of(9, seed=4), KINDS["logprobs"], True)]
    return [
        (prompt, {"temperature": 0.0, "max_tokens": 30} | kind, grammar)
        for prompt, kind, grammar in several
    ]


def ask(engine: Engine) -> list[Request]:
    requests = []
    for at, (prompt, params, grammar) in enumerate(questions()):
        constraint = EveryThird() if grammar else None
        requests.append(Request(at, prompt, SamplingParams(**params), constraint=constraint))
        engine.add(requests[-1])
    return requests


def outcome(engine: Engine, requests: list[Request]) -> list[Any]:
    """Everything that comes back; log-probabilities to a few digits, because sums differ by their order."""
    scores: dict[Request, list[Any]] = {request: [] for request in requests}
    heard: dict[Request, list[int]] = {request: [] for request in requests}
    for output in engine.run():
        heard[output.request] += output.tokens
        assert output.logprobs is None or len(output.logprobs) == len(output.tokens)
        scores[output.request] += output.logprobs or []
    found = []
    for request in requests:
        assert heard[request] == request.outputs
        prompt = engine.prompt_logprobs.pop(request, [])
        digits = [(round(s.logprob, 3), [t for t, _ in s.top]) for s in (*scores[request], *prompt)]
        found.append((request.outputs, request.finish, request.stop_reason, digits))
    return found


@functools.cache
def without_drafts(family: str) -> list[Any]:
    engine = tiny_engine(family)
    return outcome(engine, ask(engine))


def drafting(family: str, accuracy: float, drafts: int = 3, **how: Any) -> Engine:
    answers = {id: outputs for id, (outputs, *_) in enumerate(without_drafts(family))}
    drafter = NoisyDrafter(answers, accuracy, VOCABULARY, whole=True)
    return tiny_engine(family, drafter=drafter, drafts=drafts, **how)


@pytest.mark.parametrize(
    ("accuracy", "overlap"), [(0.5, False), *((accuracy, True) for accuracy in ACCURACIES)]
)
def test_tokens_are_those_of_a_run_without_drafts(accuracy, overlap):
    engine = drafting(FAMILY, accuracy, overlap=overlap)
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    speculation = engine.scheduler.speculation
    assert speculation.counts.drafted > 100
    share = speculation.counts.accepted / speculation.counts.drafted
    assert share == 0 if accuracy == 0 else share > 0.3 * accuracy
    at_rest(engine)


@pytest.mark.parametrize(
    "how",
    [
        dict(tight=True),
        dict(chunked=True, rows=3),
        dict(prefix=False, drafts=1),
        dict(plain=True, drafts=7),
    ],
    ids=["preempted", "chunked", "no prefix cache", "plain"],
)
def test_whatever_else_happens_to_them(how):
    engine = drafting(FAMILY, 0.7, overlap=True, **how)
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    assert bool(engine.scheduler.queues.preemptions) == bool(how.get("tight"))
    at_rest(engine)


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "mixtral"])
def test_families_with_windows_learned_positions_and_experts(family):
    engine = drafting(family, 0.8, overlap=True)
    assert outcome(engine, ask(engine)) == without_drafts(family)


@pytest.mark.parametrize(
    ("speculate", "drafts", "how"),
    [
        ("ngram", 4, {}),
        ("ngram", "auto", dict(tight=True, overlap=True)),
        ("suffix", 3, dict(chunked=True, rows=3, overlap=True)),
        ("auto", "auto", dict(overlap=True)),
    ],
)
def test_drafters_that_are_served_change_no_token(speculate, drafts, how):
    """Each has drafts that hold and drafts that do not; the second time, finished answers are known."""
    engine = tiny_engine(FAMILY, speculate=speculate, draft_tokens=drafts, **how)
    if speculate == "suffix":
        assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    counts = engine.scheduler.speculation.counts
    if drafts != "auto":  # how many are worth their time is measured while it runs
        assert 0 < counts.accepted < counts.drafted
    assert not engine.scheduler.speculation._acceptance
    at_rest(engine)


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_products_are_timed_when_an_engine_on_a_cpu_starts(family):
    cost_of = row_costs(model(family))
    assert cost_of(1) == 1
    assert all(1 <= cost_of(rows) < 200 for rows in range(2, 50))
    seconds = tiny_engine(family, speculate="ngram").scheduler.speculation.seconds
    assert isinstance(seconds, MeasuredSeconds)
    assert seconds(1) == 1 <= seconds(200)


@pytest.mark.parametrize("accuracy", [0.5, 1.0])
def test_where_drafts_are_waited_for_nothing_runs_ahead_of_them(accuracy):
    engine = drafting(FAMILY, accuracy, overlap=True)
    engine.scheduler.speculation.waits = True
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    assert engine.scheduler.speculation.counts.accepted > 100


def test_a_drafter_that_dies_ends_nothing():
    class Mortal(NoisyDrafter):
        def propose(self, asks):
            if self.asked > 20:
                raise RuntimeError("out of ideas")
            return super().propose(asks)

    answers = {id: outputs for id, (outputs, *_) in enumerate(without_drafts(FAMILY))}
    engine = tiny_engine(FAMILY, drafter=Mortal(answers, 0.8, VOCABULARY, whole=True), drafts=3)
    heard: list[Exception] = []
    engine.scheduler.speculation._on_failure = heard.append
    assert outcome(engine, ask(engine)) == without_drafts(FAMILY)
    assert [str(problem) for problem in heard] == ["out of ideas"]
    assert engine.scheduler.speculation.failed
    at_rest(engine)


def test_invariant_runs_agree_bit_by_bit():
    alone = tiny_engine("llama", invariant=True)
    plain = submit(alone, [SHARED], max_tokens=20, logprobs=1)[0]
    scores = [score for output in alone.run() for score in output.logprobs or []]
    drafter = NoisyDrafter({0: plain.outputs}, 0.7, VOCABULARY, whole=True)
    engine = tiny_engine("llama", invariant=True, overlap=True, drafter=drafter, drafts=3)
    request = submit(engine, [SHARED], max_tokens=20, logprobs=1)[0]
    assert [score for output in engine.run() for score in output.logprobs or []] == scores
    assert request.outputs == plain.outputs


def test_right_drafts_save_steps():
    engine = drafting(FAMILY, 1.0)
    ask(engine)
    engine.run()
    # 30 tokens by 4, and a prompt; preempted by nobody.
    assert engine.steps < 12
    assert engine.spent.sampled == sum(len(outputs) for outputs, *_ in without_drafts(FAMILY))


def test_a_stop_string_cuts_a_run():
    """What comes behind it in the same step is no part of the answer."""

    class Letters:
        def stream(self, skip_special, after=()):
            return self

        def push(self, token):
            return chr(97 + token)

        def flush(self):
            return ""

    answer = Answer(0, SamplingParams(stop=["cd"]), Letters())  # type: ignore[arg-type]
    assert not answer.push_all([0, 1])
    assert answer.push_all([2, 3, 4, 5])
    assert (answer.result().text, answer.whole.token_ids) == ("ab", [0, 1, 2, 3])
    assert (answer.whole.finish_reason, answer.whole.stop_reason) == ("stop", "cd")


def test_pages_hold_accepted_tokens_only():
    """What a request leaves in the prefix cache is right for whoever comes behind it."""
    engine = drafting(FAMILY, 0.5, overlap=True, drafts=5)
    requests = ask(engine)
    engine.run()
    first = requests[0]
    follower = Request(
        "next", first.prompt + first.outputs, SamplingParams(temperature=0, max_tokens=8)
    )
    engine.scheduler.speculation = None
    engine.add(follower)
    engine.run()
    assert follower.cached >= 16
    fresh = tiny_engine(FAMILY, prefix=False)
    wanted = submit(fresh, [follower.prompt], max_tokens=8)[0]
    fresh.run()
    assert follower.outputs == wanted.outputs


def test_accepted_is_the_run_of_draws_that_were_drafted():
    assert accepted([5, 6, 7], [5, 6]) == [5, 6, 7]
    assert accepted([5, 6, 7], [5, 9]) == [5, 6]
    assert accepted([5, 6, 7], [9, 6]) == [5]
    assert accepted([5], []) == [5]


def test_more_drafts_than_a_kernel_compares_are_refused():
    with pytest.raises(RequestError, match="drafts is 32"):
        Limits(rows=1, step_tokens=64, context=64, pages=9, page_size=16, vocabulary=9, drafts=32)


def test_draws_behind_drafts_have_the_distribution_of_the_model():
    """Chi-square, with no other run to compare with: what follows the likeliest token, where that was drafted."""
    prompt = prompt_of(12, seed=3)
    likeliest = greedy(FAMILY, prompt, 3)

    class Fixed:
        def propose(self, asks):
            return [
                likeliest[len(ask.request.outputs) + len(ask.hoped) :][: ask.most] for ask in asks
            ]

        def finish(self, request):
            pass

    engine = tiny_engine(FAMILY, rows=64, pages=600, drafter=Fixed(), drafts=2)
    requests = submit(engine, [prompt], temperature=0.4, max_tokens=3, seed=0)
    for seed in range(1, 1200):
        requests += submit(engine, [prompt], temperature=0.4, max_tokens=3, seed=seed)
    engine.run()
    drawn = [r.outputs[1] for r in requests if r.outputs[0] == likeliest[0]]
    logits_V = all_logits(model(FAMILY), [*prompt, likeliest[0]])[-1]
    expected_V = len(drawn) * (logits_V.double() / 0.4).softmax(-1).numpy()
    counted_V = np.bincount(drawn, minlength=VOCABULARY)
    common = expected_V >= 5
    sums = [np.append(own[common], own[~common].sum()) for own in (counted_V, expected_V)]
    statistic = float((((sums[0] - sums[1]) ** 2) / np.maximum(sums[1], 1e-9)).sum())
    freedom = len(sums[0]) - 1
    assert len(drawn) > 100
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5
    assert engine.scheduler.speculation.counts.accepted > 50
