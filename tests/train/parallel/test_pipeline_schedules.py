"""Schedules against theory: bubbles, memory, order, and that no rank can wait for ever."""

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.train.parallel.pipeline.actions import Action, Schedule, holder, stage_of
from cairn.train.parallel.pipeline.draw import html, text
from cairn.train.parallel.pipeline.schedules import SCHEDULES, fewest_microbatches, schedule
from cairn.train.parallel.pipeline.simulate import Costs, ScheduleError, simulate
from cairn.train.parallel.pipeline.transfers import Message, prove, with_messages

ranks_st = st.integers(1, 8)
many = st.integers(1, 32)
cost = st.integers(1, 6)


@given(ranks_st, many, cost, cost, cost, st.sampled_from(["gpipe", "1f1b"]))
def test_bubble_of_gpipe_and_1f1b(p, m, f, i, w, name):
    timeline = simulate(schedule(name, p, m), Costs(f, i, w))
    assert timeline.bubble == pytest.approx((p - 1) / (m + p - 1))
    assert timeline.span == pytest.approx((m + p - 1) * (f + i + w))


@given(ranks_st, st.integers(1, 5), st.integers(1, 5), cost, cost, cost)
def test_bubble_of_interleaved(p, rounds, v, f, i, w):
    m = p * rounds
    timeline = simulate(schedule("interleaved", p, m, v), Costs(f, i, w))
    assert timeline.bubble == pytest.approx((p - 1) / (v * m + p - 1))


@given(ranks_st, many, cost, cost, cost)
def test_idle_time_of_zb_h1(p, m, f, i, w):
    assume(
        m >= p and w <= min(f, i)
    )  # else the weight gradients are too few or too long for the gaps
    timeline = simulate(schedule("zb-h1", p, m), Costs(f, i, w))
    assert timeline.idle == pytest.approx([(p - 1) * (f + i - w)] * p)


@given(ranks_st, many, st.sampled_from(["zbv", "dualpipev"]))
def test_idle_time_in_a_v(p, m, name):
    assume(m >= 2 * p)
    timeline = simulate(schedule(name, p, m), Costs())
    stage_forward = 1 / 2
    assert timeline.idle == pytest.approx([(p - 1) * stage_forward] * p)


@given(ranks_st, many)
def test_what_each_rank_keeps(p, m):
    assert simulate(schedule("gpipe", p, m)).stash == [m] * p
    assert simulate(schedule("1f1b", p, m)).stash == [min(p - r, m) for r in range(p)]
    assert max(simulate(schedule("zb-h1", p, m)).stash) <= p  # no more than 1F1B's first rank
    assert max(simulate(schedule("zbv", p, m)).stash) <= p


@given(st.sampled_from(sorted(SCHEDULES)), ranks_st, many, st.integers(1, 4), many)
def test_messages_match_and_never_block(name, p, m, v, frozen):
    m = max(m, fewest_microbatches(name, p))
    if name == "interleaved":
        m = math.ceil(m / p) * p
    plan = schedule(name, p, m, v if name == "interleaved" else None)
    ops = with_messages(plan)
    borders = sum(plan.holder(s)[0] != plan.holder(s + 1)[0] for s in range(plan.stages - 1))
    assert prove(ops) == 2 * borders * m  # each border: every activation down, every gradient up
    first = frozen % (plan.stages + 1)  # stages before it are frozen: no gradient goes there
    up = sum(plan.holder(s)[0] != plan.holder(s + 1)[0] for s in range(first, plan.stages - 1))
    assert prove(with_messages(plan, first)) == (borders + up) * m
    for rank, todo in enumerate(ops):
        assert [op for op in todo if isinstance(op, Action)] == list(plan.ranks[rank])
        for at, op in enumerate(todo):  # what is needed has been asked for, what is sent exists
            if isinstance(op, Message) and op.way == "receive":
                chunk = plan.holder(op.stage)[1]
                kinds = ("F",) if op.what == "F" else ("B", "I")
                use = next(
                    i
                    for i, a in enumerate(todo)
                    if isinstance(a, Action)
                    and a.kind in kinds
                    and a.chunk == chunk
                    and a.microbatch == op.microbatch
                )
                assert at < use


def plan_of(name, p, m, v):
    m = max(m, fewest_microbatches(name, p))
    m = math.ceil(m / p) * p if name == "interleaved" else m
    return schedule(name, p, m, v if name == "interleaved" else None)


def most_under_way(todo):
    """How many sent tensors a rank keeps at most."""
    kept, most = set(), 0
    for op in todo:
        if isinstance(op, Message) and op.way == "send":
            kept.add(op.key)
        elif isinstance(op, Message) and op.way == "delivered":
            kept.remove(op.key)
        most = max(most, len(kept))
    return most


@given(ranks_st, many)
def test_sent_tensors_go_when_they_are_delivered(p, m):
    """1F1B keeps as few of them as it keeps activations, whatever the number of microbatches."""
    for rank, todo in enumerate(with_messages(schedule("1f1b", p, m))):
        assert most_under_way(todo) <= 2 * (p - rank)
    assert all(most_under_way(todo) <= 4 * p for todo in with_messages(plan_of("zb-h1", p, m, 1)))


@given(
    st.sampled_from(sorted(SCHEDULES)), ranks_st, st.integers(1, 12), st.integers(1, 4), many, st.randoms()
)  # fmt: skip
def test_what_is_called_delivered_has_arrived(name, p, m, v, frozen, chance):
    """Whatever the actions take: no rank may wait for a receiver, nor free what is still being sent."""
    plan = plan_of(name, p, m, v)
    ops = with_messages(plan, frozen % (plan.stages + 1))
    at, now, sent, taken = [0] * p, [0.0] * p, {}, {}
    while any(at[rank] < len(todo) for rank, todo in enumerate(ops)):
        before = list(at)
        for rank, todo in enumerate(ops):
            expected = {op.key for op in todo if isinstance(op, Message) and op.way == "receive"}
            while at[rank] < len(todo):
                op = todo[at[rank]]
                if isinstance(op, Action):
                    kind = "F" if op.kind == "F" else "I"
                    key = (kind, plan.stage_of(rank, op.chunk), op.microbatch)
                    if key in expected and key not in sent:
                        break
                    now[rank] = max(now[rank], sent.get(key, 0.0) if key in expected else 0.0)
                    if key in expected:
                        taken.setdefault(key, now[rank])
                    now[rank] += chance.uniform(0.0, 5.0)
                elif op.way == "send":
                    sent[op.key] = now[rank]
                elif op.way == "delivered":
                    assert taken[op.key] <= now[rank]
                at[rank] += 1
        assert at != before


@given(st.sampled_from(["loop", "v"]), st.integers(1, 9), st.integers(0, 40))
def test_placement_is_a_bijection(placement, size, stage):
    rank, chunk = holder(placement, size, stage)
    assert stage_of(placement, size, rank, chunk) == stage


# -- against torch's own ----------------------------------------------------------------------


def torch_order(class_name, ranks, microbatches, chunks):
    """The actions of torch's schedule of this name, as (kind, stage, microbatch), for each rank."""
    from torch.distributed.pipelining import schedules as theirs

    found = []
    for rank in range(ranks):
        plan = object.__new__(getattr(theirs, class_name))
        plan.pp_group_size, plan._n_microbatches, plan.n_local_stages = ranks, microbatches, chunks
        plan._num_stages = plan.num_stages = ranks * chunks
        rounds = max(1, microbatches // ranks)
        plan.number_of_rounds, plan.microbatches_per_round = rounds, microbatches // rounds
        actions = []
        for action in plan._calculate_single_rank_operations(rank):
            if action is not None:
                actions.extend(action.sub_actions or [action])
        found.append(
            [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        )
    return found


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (2, 8), (3, 6), (4, 8), (4, 16)])
@pytest.mark.parametrize(
    ("name", "theirs", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("zbv", "ScheduleZBVZeroBubble", 2),
        ("dualpipev", "ScheduleDualPipeV", 2),
    ],
)
def test_the_order_is_torch_s(name, theirs, chunks, p, m):
    plan = schedule(name, p, m, chunks)
    mine = [
        [(a.kind, plan.stage_of(rank, a.chunk), a.microbatch) for a in actions]
        for rank, actions in enumerate(plan.ranks)
    ]
    assert mine == torch_order(theirs, p, m, chunks)


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 8), (4, 8)])
@pytest.mark.parametrize(("name", "theirs"), [("gpipe", "ScheduleGPipe"), ("1f1b", "Schedule1F1B")])
def test_the_order_with_one_stage_each_is_torch_s(name, theirs, p, m):
    from torch.distributed.pipelining import schedules

    plan = object.__new__(getattr(schedules, theirs))
    plan._num_stages, plan._n_microbatches = p, m
    for rank, actions in plan._get_pipeline_order().items():
        mine = [(a.kind, a.microbatch) for a in schedule(name, p, m).ranks[rank]]
        found = [(a.computation_type.value, a.microbatch_index) for a in actions if a is not None]
        found = [entry for entry in found if entry[0] in ("F", "B")]
        if name == "1f1b" and rank == p - 1:  # torch 2.13 numbers the last rank's forwards from 1
            mine, found = [kind for kind, _ in mine], [kind for kind, _ in found]
        assert mine == found


# -- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("1f1g", 4, 8), "no pipeline schedule is called '1f1g'"),
        (("interleaved", 4, 6), "6 microbatches % 4 ranks = 2"),
        (("dualpipev", 4, 7), "needs 8 microbatches, not 7"),
        (("zbv", 4, 8, 3), "zbv has 2 chunks on each rank, not 3"),
        (("1f1b", 0, 8), "1f1b with 0 ranks"),
        (("gpipe", 2, 0), "gpipe with 0 microbatches"),
    ],
)
def test_refused_with_the_equation(arguments, words):
    with pytest.raises(ConfigError, match=words):
        schedule(*arguments)


def wrong(actions_0, actions_1):
    return Schedule("wrong", 1, (tuple(actions_0), tuple(actions_1)))


F0, B0, W0, I0 = (Action(kind, 0, 0) for kind in "FBWI")


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (wrong([F0, B0], [B0, F0]), "rank 1 waits in B0 for F0 of stage 1"),
        (wrong([B0, F0], [F0, B0]), "never ends"),
        (wrong([F0, B0], [F0]), "does F of microbatch 0"),
        (wrong([F0, B0], [F0, I0]), "does FI of microbatch 0"),
        (wrong([F0, F0, B0], [F0, B0]), "does F0 twice"),
        (wrong([F0, B0], [F0, W0, I0]), "waits in W0 for I0"),
        (wrong([F0, B0, Action("F", 0, 1)], [F0, B0]), "do not exist"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(plan, words):
    with pytest.raises(ScheduleError, match=words):
        simulate(plan)


def test_messages_in_two_orders_are_found_to_block():
    send = [Message("send", "F", 1, m, 1) for m in (0, 1)]
    receive = [Message("receive", "F", 1, m, 0) for m in (1, 0)]
    with pytest.raises(ScheduleError, match="messages block each other"):
        prove([list(send), list(receive)])


# -- pictures ---------------------------------------------------------------------------------


def test_the_text_shows_each_action_where_it_runs():
    plan = schedule("1f1b", 2, 2)
    lines = text(plan, simulate(plan)).splitlines()
    assert lines[0].split()[2:] == ["F0", "F1", ".", ".", "B0", "B0", ".", "B1", "B1"]
    assert lines[1].split()[2:] == [".", "F0", "B0", "B0", "F1", "B1", "B1", ".", "."]


def test_a_narrow_terminal_gets_one_letter_a_moment():
    plan = schedule("zbv", 4, 16)
    lines = text(plan, simulate(plan), width=80).splitlines()
    assert max(map(len, lines)) <= 80
    assert set("".join(x[8:] for x in lines)) <= set("FIW.")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_page_has_a_box_for_each_action(name):
    plan = schedule(name, 4, 8)
    written = html(plan, simulate(plan), Costs())
    assert written.count("<rect") == sum(map(len, plan.ranks))
    assert "bubble" in written
    assert "http" not in written.replace("http://www.w3.org", "")
