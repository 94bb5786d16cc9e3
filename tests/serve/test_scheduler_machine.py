"""The scheduler under everything that Hypothesis can think of, against a reference that knows no pages.

Requests are added and aborted, steps are scheduled, updated and lost in any order, over caches that are far too small.
Each request gets exactly the tokens that it would have got alone, in order, and nothing is left behind: that is what
`checked_scheduler` looks after.
"""

import os
import random
from typing import Any

import pytest
from checked_scheduler import MOST_IN_FLIGHT, CheckedScheduler, Question
from fake_device import EOS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cairn.models.cache import CacheGroup, most_pages
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.tiers.load_plan import Loading

VOCABULARY = 20
CONTEXT = 40
HEADS = (
    [1, 2, 3, 4, 5, 6, 7, 8],
    [1, 2, 3, 9, 9, 9, 9, 9],
)  # prompts begin alike: pages are shared
THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

parameters = st.builds(
    SamplingParams,
    max_tokens=st.one_of(st.none(), st.integers(2, 24)),
    min_tokens=st.integers(0, 2),
    ignore_eos=st.booleans(),
    stop_token_ids=st.lists(st.integers(0, VOCABULARY - 1), max_size=1),
)
prompts = st.builds(
    lambda head, shared, tail: head[:shared] + tail,
    st.sampled_from(HEADS),
    st.integers(0, 8),
    st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=4),
)
questions = st.tuples(prompts, parameters, st.integers(0, 1), st.sampled_from("aab"))


FULL, NARROW, WIDE = CacheGroup(), CacheGroup("window", 3), CacheGroup("window", 7)
STATE = CacheGroup("state")
GROUPS = (
    (FULL,),
    (FULL, NARROW),
    (NARROW, WIDE),
    (FULL, NARROW, NARROW, WIDE),
    (FULL, STATE),
    (WIDE, FULL, STATE, STATE),
)


def shared(step_tokens: int, rows: int, part: float) -> int:
    """A budget where somebody decodes, between what all rows need and that of any step; or none."""
    return rows + int(part * (step_tokens - rows)) if part >= 0 and rows <= step_tokens else 0


def with_shared(part: float, drafts: int = 0, **fields: Any) -> Limits:
    """A state cannot go back behind drafts that do not hold, so there are none with one."""
    fields["states"] *= [group.kind for group in fields["groups"]].count("state")
    if fields["states"]:
        drafts = 0
    return Limits(
        **fields,
        drafts=drafts,
        mixed_step_tokens=shared(fields["step_tokens"], fields["rows"], part),
    )


limits_of_any_size = st.builds(
    with_shared,
    part=st.sampled_from([-1, 0, 0.5]),
    rows=st.integers(1, 5),
    step_tokens=st.integers(1, 24),
    context=st.just(CONTEXT),
    pages=st.integers(4, 40),
    page_size=st.integers(1, 4),
    vocabulary=st.just(VOCABULARY),
    policy=st.sampled_from(["fcfs", "shortest"]),
    prefill_chunk=st.sampled_from([0, 0, 1, 3]),
    drafts=st.sampled_from([0, 0, 1, 3]),
    groups=st.sampled_from(GROUPS),
    states=st.integers(1, 12),  # of each group that has some
)
accuracies = st.sampled_from([0.0, 0.5, 0.9, 1.0])
choices = st.sampled_from([None, lambda tokens: 1.0, lambda tokens: 1 + 0.3 * tokens])  # seconds
ways_to_draft = st.fixed_dictionaries({"waits": st.booleans(), "seconds": choices})


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        limits=limits_of_any_size,
        prefix_caching=st.booleans(),
        accuracy=accuracies,
        how=ways_to_draft,
    )
    def start(self, limits: Limits, prefix_caching: bool, accuracy: float, how: Any) -> None:
        self.engine = CheckedScheduler(limits, prefix_caching, accuracy, **how)

    @rule(several=st.lists(questions, min_size=1, max_size=5))
    def add(self, several: list[Question]) -> None:
        for question in several:
            self.engine.add(*question)

    @precondition(lambda self: self.engine.alive)
    @rule(which=st.integers(0, 100))
    def abort(self, which: int) -> None:
        self.engine.abort(self.engine.alive[which % len(self.engine.alive)])

    @precondition(lambda self: len(self.engine.in_flight) < MOST_IN_FLIGHT)
    @rule()
    def schedule(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def update(self) -> None:
        self.engine.update()

    @rule(times=st.integers(1, 12), depth=st.integers(0, MOST_IN_FLIGHT - 1))
    def run(self, times: int, depth: int) -> None:
        for _ in range(times):
            self.engine.run(depth)
            self.engine.check()

    @precondition(lambda self: len(self.engine.in_flight) < MOST_IN_FLIGHT)
    @rule(followed=st.booleans(), arriving=st.lists(questions, max_size=3))
    def lose_a_step(self, followed: bool, arriving: list[Question]) -> None:
        self.engine.lose_a_step(followed, arriving)

    @invariant()
    def everything_is_in_order(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=2000 if THOROUGH else 40, stateful_step_count=20
)


def random_question(rng: random.Random) -> Question:
    head = rng.choice(HEADS)[: rng.randint(0, 8)]
    params = SamplingParams(
        max_tokens=rng.choice([None, 2, 5, 12, 24]),
        min_tokens=rng.choice([0, 0, 0, 2]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[rng.randrange(VOCABULARY)] if rng.random() < 0.3 else [],
    )
    prompt = head + [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 6))]
    return prompt, params, rng.choice([0, 0, 1]), rng.choice("aab")


@pytest.mark.parametrize("seed", range(100 if THOROUGH else len(GROUPS)))
@pytest.mark.parametrize("depth", [0, 1, 2] if THOROUGH else [0, 1])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_soak(seed: int, depth: int, prefix_caching: bool) -> None:
    """Hundreds of requests through a cache that holds a few, some aborted, at every depth of overlap."""
    rng = random.Random(f"{seed} {depth} {prefix_caching}")
    page_size, groups = rng.choice([1, 2, 4]), GROUPS[seed % len(GROUPS)]
    least = 0.7 if FULL in groups else 1.0  # smaller windows never move
    room = rng.uniform(least, 1.4)  # of the pages that the longest request may need
    limits = with_shared(
        part=rng.choice([-1, 0, 0.3]),
        rows=rng.randint(3, 8),
        step_tokens=rng.choice([8, 16, 64]),
        context=CONTEXT,
        pages=1 + int(room * most_pages(groups, CONTEXT, page_size)),
        page_size=page_size,
        groups=groups,
        vocabulary=VOCABULARY,
        policy=rng.choice(["fcfs", "shortest"]),
        prefill_chunk=rng.choice([0, 0, 4]),
        drafts=[0, 1, 3, 5][(seed + depth) % 4],
        states=rng.choice([2, 8, 16]),
    )
    waits = bool(seed % 2)
    accuracy = rng.choice([0.5, 0.9])
    engine = CheckedScheduler(limits, prefix_caching, accuracy, waits=waits)
    for _ in range(120):
        if rng.random() < 0.4:
            for _ in range(rng.randint(1, 4)):
                engine.add(*random_question(rng))
        if engine.alive and rng.random() < 0.1:
            engine.abort(rng.choice(engine.alive))
        if rng.random() < 0.02:
            engine.lose_a_step(rng.random() < 0.5, [random_question(rng)])
        engine.run(depth)
        engine.check()
    engine.drain(depth)
    stateful = engine.scheduler.blocks.stateful  # snapshots are few, and found only at their length
    for event in (
        "preempted",
        "prefix hit" if prefix_caching and not stateful else "length",
        "stop",
    ):
        assert engine.seen[event], f"the soak met no {event}: {engine.seen}"
    if depth:
        assert engine.seen["ahead of the host"]
    if limits.drafts:
        speculation = engine.scheduler.speculation
        assert speculation is not None
        assert 0 < speculation.counts.accepted < speculation.counts.drafted
        assert bool(engine.seen["drafts ahead of drafts"]) == bool(depth and not waits)
    if engine.scheduler.blocks.windowed:
        assert engine.seen["window"]
    if stateful and prefix_caching:
        assert engine.seen["saved"]


def test_whoever_builds_upon_a_lost_step_is_lost_with_it() -> None:
    """The same without memory pressure, so that newcomers do find pages that were never written."""
    rng, met = random.Random(0), 0
    for _ in range(60):
        limits = Limits(
            rows=8,
            step_tokens=rng.choice([6, 64]),
            context=CONTEXT,
            pages=100,
            page_size=2,
            vocabulary=VOCABULARY,
        )
        engine = CheckedScheduler(limits)
        for _ in range(rng.randint(1, 3)):
            engine.add(*random_question(rng))
        for _ in range(rng.randint(0, 2)):
            engine.run(depth=1)
        engine.lose_a_step(followed=True, arriving=[random_question(rng) for _ in range(3)])
        for _ in range(2):
            engine.add(*random_question(rng))
        engine.drain(depth=1)
        met += engine.seen["lost with others"]
    assert met


class Tier:
    """Brings the third page of whoever has two already, and never does."""

    def begin(self, request):
        if request.computed == 4:
            request.loading = Loading(2, 3, 0.0)

    def left(self, request):
        request.loading = None

    def first_missing(self, request, place):
        return place

    def filled(self, request, group, place, page):
        pass

    def taken(self, page):
        pass


def test_whoever_waits_for_a_tier_behind_pages_of_a_lost_step_looks_again() -> None:
    """It has found them and computed nothing: it is not lost, and must not go on with what nobody wrote."""
    limits = Limits(
        rows=4, step_tokens=64, context=CONTEXT, pages=20, page_size=2, vocabulary=VOCABULARY
    )
    scheduler = Scheduler(limits)
    scheduler.tiers = scheduler.blocks.tiers = Tier()
    first, second = (
        Request(n, [1, 2, 3, 4, *rest], SamplingParams(max_tokens=2))
        for n, rest in enumerate(([5], [6, 7, 8]))
    )
    scheduler.add(first)
    lost = scheduler.schedule()
    scheduler.add(second)
    scheduler.schedule()
    assert second.loading is not None
    assert second.blocks[:2] == first.blocks[:2]
    (ended,) = scheduler.fail(lost, "the device is gone")
    assert (ended.request, second.state, second.blocks) == (first, "waiting", [])
    scheduler.queues.check_integrity()
    assert scheduler.schedule().chunks[0].start == 0


@pytest.mark.parametrize("groups", GROUPS, ids=str)
def test_turns_of_conversations_find_what_the_turn_before_has_computed(groups) -> None:
    """Eight users, four turns each, behind one system prompt: windows keep the hits of full attention, states most."""
    hits = {}
    for kinds in ((FULL,), groups):
        rng = random.Random(1)
        limits = Limits(
            rows=4,
            step_tokens=16,
            context=200,
            pages=1000,
            page_size=2,
            vocabulary=VOCABULARY,
            groups=kinds,
            states=200 if STATE in kinds else 0,
        )
        engine = CheckedScheduler(limits)
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        talks = [[7, 7, 3, 1, EOS] for _ in range(8)]
        for _ in range(4):
            asked = []
            for talk in talks:
                talk += [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(2, 9))] + [EOS]
                asked.append(engine.add(list(talk), params))
            engine.drain_requests(depth=1)
            for talk, request in zip(talks, asked, strict=True):
                talk += [*request.outputs, EOS]
        engine.drain()
        hits[kinds] = engine.scheduler.blocks.prefix.statistics.hits
        assert engine.seen["restored"] or STATE not in kinds
    least = 0.5 if STATE in groups else 0.95
    assert hits[groups] >= least * hits[FULL,]
