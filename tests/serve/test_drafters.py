"""Drafters against searches that look everywhere, the choice of how many drafts against all choices."""

import itertools
import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.core.errors import UsageError
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.speculate.acceptance import ANY, FORCED, MATCH, Acceptance, Counts
from cairn.serve.engine.speculate.controller import Prospect, choose_drafts, expected
from cairn.serve.engine.speculate.drafter import Ask
from cairn.serve.engine.speculate.grammar_tokens import GrammarDrafter
from cairn.serve.engine.speculate.ngram import NgramDrafter
from cairn.serve.engine.speculate.occurrences import LONGEST, Occurrences
from cairn.serve.engine.speculate.row_costs import continued
from cairn.serve.engine.speculate.speculation import Speculation
from cairn.serve.engine.speculate.step_seconds import MeasuredSeconds, modelled_seconds
from cairn.serve.engine.speculate.suffix import LEAST_PROBABILITY, SuffixDrafter
from cairn.serve.engine.speculate.synthetic import SyntheticAcceptance, rates_of_length, read_rates

few_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def request_of(prompt, outputs=(), salt=""):
    request = Request(0, list(prompt), SamplingParams(), salt=salt)
    request.outputs += outputs
    return request


@given(prompt=few_tokens, outputs=few_tokens, hoped=st.lists(st.integers(0, 2), max_size=3))
def test_ngram_copies_what_followed_the_longest_match(prompt, outputs, hoped):
    drafter, request = NgramDrafter(), request_of(prompt)
    for token in outputs:  # the index grows with the answer
        drafter.propose([Ask(request, [], 2)])
        request.outputs.append(token)
    (found,) = drafter.propose([Ask(request, hoped, 5)])
    known = prompt + outputs
    text = known + hoped
    # Only tokens that are known are searched, so a match has to end before one of them.
    places = [at for at in range(2, len(known)) if text[at - 2 : at] == text[-2:]]
    if not places or len(text) < 2:
        assert found == []
        return

    def length(at):
        return next(
            (n for n in range(LONGEST) if n >= at or text[at - 1 - n] != text[len(text) - 1 - n]),
            LONGEST,
        )

    at = max(places, key=lambda place: (length(place), place))
    wanted = list(text)
    for step in range(5):
        wanted.append(wanted[at + step])
    assert found == wanted[len(text) :]


def suffix_oracle(texts, tail, most):
    """A dictionary of all substrings with their counts, as a suffix tree has them."""
    counts = Counter(
        tuple(text[start:end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text) + 1)
    )
    best = (0.0, 0)
    for length in range(2, min(len(tail), LONGEST) + 1):
        here, probability, score, size = tuple(tail[-length:]), 1.0, 0.0, 0
        # Where the tail itself is the end of a text, nothing follows it there.
        before = counts[here] - sum(tuple(text[-length:]) == here for text in texts)
        while size < min(most, length):
            nexts = {t: counts[(*here, t)] for t in range(3) if counts[(*here, t)]}
            if not nexts or not before:
                break
            token = max(nexts, key=nexts.__getitem__)
            probability *= nexts[token] / before
            if probability < LEAST_PROBABILITY:
                break
            score, size = score + probability, size + 1
            before, here = nexts[token], (*here, token)
        best = max(best, (score, size))
    return best


@given(texts=st.lists(few_tokens, min_size=1, max_size=4), most=st.integers(1, 6))
def test_suffix_scores_as_a_tree_of_all_substrings(texts, most):
    from cairn.serve.engine.speculate.suffix import best_draft

    index = Occurrences(recent=1000)
    for text in texts:
        index.index(text, 0)
    tail = texts[-1][-LONGEST:]
    found = best_draft(index.matches(tail), most)
    score, _ = suffix_oracle(texts, tail, most)
    # Of equally frequent tokens either may be followed; the first step has no such choice where counts differ.
    assert found.score == pytest.approx(score) or _has_ties(texts, tail)


def _has_ties(texts, tail):
    counts = Counter(
        (tuple(text[start:end]), text[end])
        for text in texts
        for start in range(len(text))
        for end in range(start + 1, len(text))
    )
    by_context = {}
    for (context, _), count in counts.items():
        by_context.setdefault(context, []).append(count)
    return any(sorted(found)[-2:] == [max(found)] * 2 for found in by_context.values())


def test_suffix_prefers_what_came_most_often():
    drafter = SuffixDrafter()
    request = request_of([*[1, 2, 3, 9] * 3, 1, 2, 4, 8, 1, 2])
    (found,) = drafter.propose([Ask(request, [], 4)])
    assert found[:1] == [3]


def test_finished_answers_are_drafted_from_and_bounded():
    drafter = SuffixDrafter(most_finished=40)
    first = request_of([50], outputs=range(20))
    drafter.propose([Ask(first, [], 4)])
    drafter.finish(first)
    later = request_of([60, 5, 6, 7, 8])
    assert drafter.propose([Ask(later, [], 4)])[0] == [9, 10, 11, 12]
    for at in range(3):  # pushes out the first one
        other = request_of([70 + at], outputs=range(100 * (at + 1), 100 * (at + 1) + 18))
        drafter.propose([Ask(other, [], 4)])
        drafter.finish(other)
    assert drafter.finished.tokens <= 40
    assert drafter.propose([Ask(later, [], 4)])[0] == []
    assert len(drafter.finished.index) == 2 * 17


def test_a_salted_request_shares_no_text():
    drafter = SuffixDrafter()
    secret = request_of([1], outputs=range(10, 30), salt="tenant a")
    drafter.propose([Ask(secret, [], 4)])
    drafter.finish(secret)
    assert drafter.finished.tokens == 0
    open_one = request_of([1], outputs=range(10, 30))
    drafter.propose([Ask(open_one, [], 4)])
    drafter.finish(open_one)
    assert drafter.propose([Ask(request_of([14, 15, 16], salt="b"), [], 4)])[0] == []
    assert drafter.propose([Ask(request_of([14, 15, 16]), [], 4)])[0] == [17, 18, 19]


def test_drafters_forget_requests_that_ended():
    drafter = NgramDrafter()
    request = request_of([1, 2, 1, 2])
    drafter.propose([Ask(request, [], 1)])
    drafter.finish(request)
    drafter.finish(request)  # and one that was never asked about
    assert len(drafter._texts) == 0


# -- how many drafts ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 3)), min_size=1, max_size=3),
    fixed=st.floats(0.1, 10),
    each=st.floats(0.001, 2),
    bend=st.integers(1, 8),
)
def test_the_choice_is_the_best_of_all_choices(rows, fixed, each, bend):
    prospects = [Prospect(*row) for row in rows]

    def seconds(tokens):
        return fixed + each * max(tokens - bend, 0)

    def rate(counts):
        total = sum(expected(p.chance, n) for p, n in zip(prospects, counts, strict=True))
        return total / seconds(len(counts) + sum(counts))

    every = itertools.product(*(range(p.proposed + 1) for p in prospects))
    best, plain = max(map(rate, every)), rate([0] * len(rows))
    found = choose_drafts(prospects, seconds)
    assert all(n <= p.proposed for n, p in zip(found, prospects, strict=True))
    if best >= 1.0201 * plain:
        assert rate(found) == pytest.approx(best)
    elif best < 1.0199 * plain:
        assert found == [0] * len(rows)


def test_padded_rows_share_a_width():
    sure, unsure = Prospect(0.95, 7), Prospect(0.1, 7)

    def flat(tokens):
        return 1.0

    def steep(tokens):
        return float(tokens)

    assert choose_drafts([sure, unsure], flat, widths=(1, 2, 4, 8)) == [7, 7]
    assert choose_drafts([sure, unsure], steep, widths=(1, 2, 4, 8)) == [0, 0]
    assert choose_drafts([], flat) == []
    assert choose_drafts([sure], flat, wait_s=100.0) == [0]


def test_acceptance_follows_what_happens():
    acceptance = Acceptance()
    start = acceptance.rate
    for _ in range(8):
        acceptance.note(4, 0)
    assert acceptance.rate < 0.12  # soon
    for _ in range(42):
        acceptance.note(4, 0)
    low = acceptance.rate
    assert low < 0.1 < start
    for _ in range(200):  # without drafts what was seen is forgotten, so it is tried again
        acceptance.note(0, 0)
    assert acceptance.rate > 3 * low
    acceptance.note(4, 4)  # one run that holds counts for more than what was believed
    assert acceptance.rate > 0.6
    for _ in range(50):
        acceptance.note(4, 4)
    assert acceptance.rate > 0.9


def test_drafts_are_believed_by_what_they_rest_on():
    """Four rows take 2.3 times as long as one: a long match is worth that; a short one is not, or one that fails."""
    speculation = Speculation(
        NgramDrafter(),
        seconds=lambda tokens: 0.55 + 0.45 * -(-tokens // 4) * 4 if tokens > 1 else 1.0,
    )
    story, answers = list(range(100, 140)), {}
    for match in (2, 5, 12):
        request = Request(match, [*story, 1, 2, 3, *story[:match]], SamplingParams(max_tokens=99))
        request.total, request.end = len(request.prompt), 200
        speculation.plan([request], 7)
        answers[match] = speculation.planned(request).drafts
    assert answers[2] == 0 < answers[5] <= answers[12]
    failed = 0
    while drafts := speculation.planned(request).drafts:
        failed += 1
        speculation.launch(request, drafts)
        speculation._settle(request, [0], drafts)
        request.total = len(request.prompt)
        speculation.plan([request], 7)
    assert failed <= 4
    assert speculation.rate(request, MATCH) == pytest.approx(MATCH.start)  # which has not failed


def test_a_forced_draft_is_asked_for_where_others_are_not_worth_it():
    """What a grammar forces is another kind than what a drafter proposes; without a grammar nobody is asked."""
    asked = []

    class Never:
        def propose(self, asks):
            asked.extend(asks)
            return [[] for _ in asks]

        def finish(self, request): ...

    speculation = Speculation(GrammarDrafter(Never()), seconds=lambda tokens: float(tokens**0.9))
    request = Request(0, [1, 2, 3], SamplingParams(max_tokens=9))
    request.total, request.end = 3, 12
    speculation.plan([request], 4)
    assert not asked  # a half of such drafts holds, at most
    assert FORCED.start > ANY.start


def test_counts_have_the_meanings_of_vllm():
    counts = Counts()
    for drafts, held in ((4, 4), (4, 1), (2, 0), (0, 0)):
        counts.note(drafts, held)
    assert (counts.runs, counts.drafted, counts.accepted) == (3, 10, 5)
    assert counts.by_position == [2, 1, 1, 1]
    assert counts.length == pytest.approx(1 + 5 / 3)


def test_measured_seconds_find_the_line():
    """Four tenths of a step of one row are no products, where a tenth is believed."""
    seconds = MeasuredSeconds(lambda n: 0.6 + 0.4 * n)
    chance = random.Random(1)
    for _ in range(300):
        tokens = chance.choice([1, 2, 4, 8])
        seconds.note(tokens, 0.01 + 0.015 * (0.6 + 0.4 * tokens))
    assert seconds(8) / seconds(1) == pytest.approx(0.067 / 0.025, rel=0.08)
    seconds.note(4, 0.0)  # a clock that did not move says nothing


def test_measured_seconds_hold_against_a_busy_machine():
    """Some steps take ten times as long as others, whatever their tokens; a step of 8 takes 1.7 times that of one."""
    seconds, chance = MeasuredSeconds(lambda n: 0.9 + 0.1 * n), random.Random(2)
    assert 1.5 < seconds(8) / seconds(1) < 1.8  # as its products do, before any step has been timed
    for _ in range(60):
        tokens = chance.choice([1, 1, 1, 8])
        seconds.note(tokens, (0.9 + 0.1 * tokens) * chance.choice([1, 1, 1, 2, 4, 10]))
        assert 1.2 < seconds(8) / seconds(1) < 3.2


def test_drafts_fill_the_rows_that_products_multiply_together():
    """Steps of 1, 4 and 8 rows were seen; their products cost what those of a CPU with AVX-512 do."""
    costs = (1, 1.1, 1.8, 1.4, 2.1, 2.4, 3.2, 2.1, 2.9, 3.1, 3.9, 3.3, 4.2, 4.5, 5.3, 4.1)
    seconds = MeasuredSeconds(partial(continued, costs))
    for _ in range(100):
        for rows in (1, 4, 8):
            seconds.note(rows, 0.004 + 0.02 * costs[rows - 1])
    assert seconds(3) == pytest.approx(0.004 + 0.02 * 1.8, rel=0.03)
    for chance, proposed, best in (
        (0.9, 15, 7),
        (0.9, 6, 3),
        (0.5, 15, 3),
        (0.3, 15, 1),
        (0.1, 9, 0),
    ):
        assert choose_drafts([Prospect(chance, proposed)], seconds) == [best]


def test_costs_go_on_behind_the_rows_that_were_timed():
    costs = [1.0, *(1 + 0.25 * n + (n % 8 == 3) for n in range(2, 17))]
    found = [continued(costs, rows) for rows in (1, 16, 17, 19, 24, 160)]
    assert found == pytest.approx([1.0, 5.0, 5.25, 6.75, 7.0, 41.0])


def test_modelled_seconds_of_a_gpu():
    from cairn.models.presets import preset

    dense = modelled_seconds(preset("qwen3-8b"), 2.0, 1, "NVIDIA H200", "bf16")
    assert dense(5) == dense(1)
    assert dense(4096) > 3 * dense(1)
    experts = modelled_seconds(preset("qwen3-30b-a3b"), 2.0, 1, "NVIDIA H200", "bf16")
    assert experts(4) > 1.5 * experts(1)  # each token brings experts of its own
    unknown = modelled_seconds(preset("qwen3-8b"), 2.0, 1, "a GPU of next year", "bf16")
    assert unknown(8) == unknown(1) < unknown(256)


def test_synthetic_rates():
    rates = rates_of_length(3.0, 4)
    assert sum(rates) == pytest.approx(2.0)
    assert read_rates("3.0", 4) == rates
    assert read_rates("0.8, 0.5", 2) == [0.8, 0.5]
    assert read_rates("3.0", "auto") == rates
    assert read_rates("0.8 0.5", "auto") == [0.8, 0.5]
    assert [len(read_rates(text, "auto")) for text in ("0.7", "1", "5.2", "31.5")] == [1, 1, 6, 31]
    for wrong in ("0.5,0.8", "0.5", "6", "x", "1.2,0.1", ""):
        with pytest.raises(UsageError, match="synthetic-acceptance"):
            read_rates(wrong, 2)
    for wrong in ("0.5,0.8", "33", "inf", "nan", "-1", ",", "0.5 " * 32):
        with pytest.raises(UsageError, match="synthetic-acceptance"):
            read_rates(wrong, "auto")
    accept, lengths = SyntheticAcceptance([0.75, 0.5, 0.25]), Counter()
    request = request_of([1])
    for _ in range(4000):
        run = accept(request, [7, 8, 9, 10], [1, 2, 3])
        assert run[:-1] == [1, 2, 3][: len(run) - 1]
        lengths[len(run)] += 1
        request.outputs.append(0)
    assert all(abs(lengths[n] / 4000 - 0.25) < 0.04 for n in (1, 2, 3, 4))


# -- a model that drafts ---------------------------------------------------------------------------


def test_a_model_that_drafts_for_itself_is_always_right():
    """Greedy and seeded: the noise of a draw is the same in both engines."""
    from tiny_engines import VOCABULARY, prompt_of, submit, tiny_engine

    from cairn.serve.engine.speculate.draft_model import ModelDrafter

    own = tiny_engine("qwen3", rows=4)
    engine = tiny_engine("qwen3", rows=4, drafter=ModelDrafter(own, VOCABULARY), drafts=3)
    kinds = [{}, dict(temperature=1.1, seed=5), dict(temperature=0.8, top_k=30, seed=6)]
    plain = tiny_engine("qwen3", rows=4)
    found, wanted = (
        [
            submit(which, [prompt_of(20 + n, n)], max_tokens=21, **kind)[0]
            for n, kind in enumerate(kinds)
        ]
        for which in (engine, plain)
    )
    engine.run(), plain.run()
    assert [r.outputs for r in found] == [r.outputs for r in wanted]
    counts = engine.scheduler.speculation.counts
    assert counts.accepted == counts.drafted == 3 * 15
    assert not own.scheduler.requests


def test_a_text_that_the_draft_model_cannot_hold_goes_without_drafts():
    from tiny_engines import VOCABULARY, prompt_of, tiny_engine

    from cairn.serve.engine.speculate.draft_model import ModelDrafter

    drafter = ModelDrafter(tiny_engine("qwen3", rows=2, pages=3), VOCABULARY)
    short, long = request_of(prompt_of(8, 1)), request_of(prompt_of(60, 2))
    found = drafter.propose([Ask(long, [], 3), Ask(short, [], 3)])
    assert [len(tokens) for tokens in found] == [0, 3]
    drafter.vocabulary = most = max(found[1])  # the model that verifies has fewer tokens
    known = list(itertools.takewhile(lambda token: token < most, found[1]))
    assert drafter.propose([Ask(short, [], 3)]) == [known]


def test_a_draft_model_has_no_tiers_of_its_own():
    """They would take the host's memory twice, and the port at which pages are shared."""
    from cairn.models.runnable import open_model
    from cairn.serve.config import EngineConfig
    from cairn.serve.engine.speculate.draft_model import open_draft_model

    name = "random:tiny-llama"
    config = EngineConfig(model=name, speculate=name, device="cpu", max_model_len=64, max_num_seqs=2,
                          kv_offload_host="1MiB", kv_offload_share="127.0.0.1:0")  # fmt: skip
    drafter = open_draft_model(config, open_model(name))
    assert drafter.engine.tiers is None
    assert len(drafter.propose([Ask(request_of([5, 9, 7]), [], 3)])[0]) == 3


def test_a_name_that_names_nothing_is_refused_with_the_drafters_there_are():
    from tiny_engines import tiny_engine

    from cairn.core.errors import ConfigError

    with pytest.raises(ConfigError, match=r"speculate is nonsense.*use off, grammar, ngram"):
        tiny_engine("qwen3", speculate="nonsense")


def test_other_tokens_are_refused_with_the_first_difference():
    from cairn.core.errors import ConfigError
    from cairn.models.runnable import OpenModel, open_model
    from cairn.serve.engine.speculate.draft_model import check_same_tokens

    target, draft = open_model("random:tiny"), open_model("random:qwen3-0.6b")
    check_same_tokens(target, target)
    with pytest.raises(ConfigError, match="151936 tokens against"):
        check_same_tokens(target, draft)

    class Words:
        def __init__(self, words):
            self.backend = self
            self.get_vocab = lambda: {word: n for n, word in enumerate(words)}

    ours, theirs = (
        OpenModel(name, target.spec, Words(words), (), None)  # type: ignore[arg-type]
        for name, words in (("large", "abcd"), ("small", "abxd"))
    )
    with pytest.raises(ConfigError, match="small cannot draft for large: token 2 is 'x', not 'c'"):
        check_same_tokens(ours, theirs)
