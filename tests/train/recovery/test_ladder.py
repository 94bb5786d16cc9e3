"""Which answer to which failure: pure, so everything that can be left over is tried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_runs import recipe

from cairn.core.errors import ConfigError
from cairn.core.exit_cause import CAUSES
from cairn.core.job_events import Ended, Started, Submitted
from cairn.core.job_ledger import account
from cairn.core.job_ledger_files import write_ledger
from cairn.train.config import Data
from cairn.train.parallel.layout import Layout
from cairn.train.recovery.fewer_ranks import for_ranks, wait_idle
from cairn.train.recovery.ladder import Incident, Survivors, grown, respond
from cairn.train.recovery.settings import Recovery
from cairn.train.recovery.templates import best_for, cover, fitting, shrunk, templates

SETTINGS = Recovery(restarts=5, same_place=3)


def batch_of(sequences, layers=8):
    """A layout fits when the batch divides and every stage has a layer."""

    def check(layout):
        if sequences % layout.data_ranks() or layout.pp > layers:
            raise ConfigError("no")

    return fitting(check)


def left(**changes):
    given = dict(
        layout=Layout(dp=4), nodes=(0, 1), spares=(), ranks_per_node=2, strikes={}, failures=1
    )
    return Survivors(**(given | changes))


@pytest.mark.parametrize(
    ("incident", "changes", "rung"),
    [
        (Incident(cause="killed", rank=1, node=0), {}, "heal"),
        (Incident(cause="hang", rank=1, node=0), {}, "heal"),
        (Incident(cause="network"), {}, "redo"),
        (Incident(cause="corruption", rank=1, node=0), {}, "redo"),
        (Incident(cause="corruption"), {}, "redo"),
        (Incident(cause="oom", rank=0, node=0), {}, "heal"),
        (Incident(cause="oom", rank=0, node=0, same_step=2), {}, "stop"),
        (Incident(cause="user", rank=0, node=0), {}, "stop"),
        (Incident(cause="killed", rank=0, node=0), dict(failures=6), "stop"),
        (Incident(cause="hardware", rank=0, node=1), dict(spares=(2,)), "spare"),
        (Incident(cause="hardware", rank=0, node=1, node_lost=True), {}, "shrink"),
        (Incident(cause="killed", rank=0, node=1), dict(strikes={1: 3}), "shrink"),
        (Incident(cause="network", rank=0, node=1), dict(strikes={1: 3}, spares=(2,)), "spare"),
        (Incident(cause="preemption", rank=0, node=1, node_lost=True), {}, "shrink"),
        (Incident(cause="hardware", rank=0, node=1), dict(layout=Layout(pp=4)), "template"),
        (Incident(cause="hardware", rank=0, node=1), dict(layout=Layout(tp=4)), "requeue"),
        (Incident(cause="hardware", rank=0, node=0), dict(nodes=(0,)), "requeue"),
        (
            Incident(cause="straggler", rank=0, node=1),
            dict(spares=(2,)),
            "tell",
        ),  # nobody asked for more
    ],
)
def test_each_failure_has_its_rung(incident, changes, rung):
    response = respond(incident, left(**changes), SETTINGS, batch_of(8))
    assert response.rung == rung
    assert response.why


@pytest.mark.parametrize(
    ("changes", "rung"),
    [
        (dict(spares=(2,)), "spare"),
        (dict(), "shrink"),
        (dict(nodes=(0,)), "tell"),  # a slow node is better than none
        (dict(failures=6, spares=(2,)), "tell"),
    ],
)
def test_a_straggler_is_done_without_where_that_was_asked_for_and_others_can_go_on(changes, rung):
    settings = Recovery(restarts=5, slow_action="replace")
    incident = Incident(cause="straggler", rank=0, node=0, why="slow")
    response = respond(incident, left(**changes), settings, batch_of(8))
    assert (response.rung, bool(response.nodes)) == (rung, True)


LAYOUTS = st.builds(
    Layout, dp=st.integers(1, 4), fsdp=st.integers(1, 2), pp=st.integers(1, 4), tp=st.integers(1, 2)
)


@given(
    st.builds(
        Incident,
        cause=st.sampled_from([c for c in CAUSES if c != "finished"]),
        rank=st.none() | st.just(0),
        node=st.none() | st.integers(0, 3),
        node_lost=st.booleans(),
        same_step=st.integers(0, 3),
    ),
    LAYOUTS,
    st.integers(0, 2),
    st.integers(1, 8),
    st.dictionaries(st.integers(0, 3), st.integers(0, 5)),
)
def test_what_is_answered_can_be_done(incident, layout, spares, failures, strikes):
    """Never more ranks than there are places, never the bad node, never a layout that does not fit."""
    fits = batch_of(layout.data_ranks())
    nodes = (0, 1, 2, 3)
    what = Survivors(
        layout=layout,
        nodes=nodes,
        spares=tuple(range(4, 4 + spares)),
        ranks_per_node=-(-layout.world() // 4),
        strikes=strikes,
        failures=failures,
    )
    response = respond(incident, what, SETTINGS, fits)
    if response.rung in ("stop", "requeue"):
        return
    assert response.nodes
    assert set(response.nodes) <= {*nodes, *what.spares}
    if response.rung in ("spare", "shrink", "template"):
        assert incident.node not in response.nodes
    if response.layout is not None:
        assert fits(response.layout)
        assert response.layout.world() <= len(response.nodes) * what.ranks_per_node
        assert response.layout.tp == layout.tp


@given(LAYOUTS, st.integers(1, 64))
def test_a_template_uses_as_many_ranks_as_can_be_used(layout, sequences):
    """Beside a brute force over all grids that are not larger in any direction but dp."""
    fits = batch_of(sequences)
    table = templates(layout, fits)
    for ranks in range(1, layout.world()):
        every = [
            Layout(dp=dp, fsdp=fsdp, pp=pp, tp=layout.tp)
            for pp in range(1, layout.pp + 1)
            for fsdp in range(1, layout.fsdp + 1)
            for dp in range(1, layout.world() + 1)
        ]
        possible = [one.world() for one in every if one.world() <= ranks and fits(one)]
        assert (table[ranks].world() if ranks in table else 0) == max(possible, default=0)


def test_shrinking_keeps_the_batch():
    assert shrunk(Layout(dp=4), 3, batch_of(8)) == Layout(dp=2)
    assert shrunk(Layout(dp=4), 3, batch_of(12)) == Layout(dp=3)
    assert shrunk(Layout(dp=2, pp=2), 3, batch_of(8)) == Layout(dp=1, pp=2)
    assert shrunk(Layout(pp=4), 3, batch_of(8)) is None
    assert best_for(Layout(pp=4), 3, batch_of(8, layers=4)) == Layout(pp=3)


def test_growing_back_takes_the_largest_layout():
    small = left(nodes=(0,))
    response = grown(small, (1,), batch_of(8))
    assert response is not None
    assert (response.layout, response.nodes) == (Layout(dp=4), (0, 1))
    assert grown(small, (), batch_of(8)) is None


@given(st.integers(0, 30))
def test_mixed_pipelines_cover_any_number_of_nodes(nodes):
    """Oobleck: templates of 2, 3 and 4 nodes make up every count from 2 on, with the best rate."""
    rate = {2: 1.0, 3: 1.4, 4: 2.2}.__getitem__
    chosen = cover(nodes, (2, 3, 4), rate)
    assert sum(chosen) <= nodes
    best = max(
        sum(map(rate, (2,) * a + (3,) * b + (4,) * c))
        for a in range(16)
        for b in range(11)
        for c in range(8)
        if 2 * a + 3 * b + 4 * c <= nodes
    )
    assert sum(map(rate, chosen)) == pytest.approx(best)


def test_a_launched_job_that_has_shrunk_runs_in_its_template(tmp_path):
    """As its ranks find out by themselves: each asks the same pure function."""
    data = Data(sources=["random"], sequence=16, sequences=8, microbatch=1)
    asked = recipe(tmp_path, parallel=Layout(dp=2, pp=2), data=data)
    fits = batch_of(8)
    assert for_ranks(asked, 4, fits) is asked
    assert [for_ranks(asked, ranks, fits).parallel for ranks in (3, 2)] == [Layout(pp=2)] * 2
    assert for_ranks(asked, 1, fits).parallel == Layout()
    with pytest.raises(ConfigError, match="1 ranks are left of 2, and no layout smaller than tp 2"):
        for_ranks(recipe(tmp_path, parallel=Layout(tp=2)), 1, fits)


def test_a_rank_without_work_waits_for_the_end_of_the_run(tmp_path):
    said = []
    write_ledger(tmp_path, account([Submitted(at=0.0), Started(at=1.0, step=0), Ended(at=2.0)]))
    wait_idle(recipe(tmp_path, parallel=Layout(pp=2)), 2, said.append)
    assert said == ["rank 2 has nothing to do in pp 2; it waits for the end of the run"]
