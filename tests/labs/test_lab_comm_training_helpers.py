"""What the labs of collectives and training compute themselves, against plain counting."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.labs.comm.alpha_beta import link_of
from cairn.labs.comm.buckets_overlap import exposed_s
from cairn.labs.comm.in_network import scale_for
from cairn.labs.comm.sparse_all_reduce import share
from cairn.labs.training._sleepers import idle_share
from cairn.labs.training.cp_zigzag import contiguous_excess, pairs
from cairn.labs.training.pipeline_bubbles import formula
from cairn.train.parallel.pipeline.actions import Action, Schedule
from cairn.train.parallel.pipeline.schedules import schedule
from cairn.train.parallel.pipeline.simulate import Costs, simulate

share_of_time = st.floats(0.01, 5.0)


@given(alpha=st.floats(1, 1000), rate=st.floats(0.01, 500), small=st.integers(1, 4096))
def test_two_points_give_back_the_link(alpha, rate, small):
    def us(size):
        return alpha + size / (1e3 * rate)

    link = link_of((small, us(small)), (64 << 20, us(64 << 20)))
    assert link.alpha_us == pytest.approx(alpha, rel=1e-3, abs=1e-3)
    assert link.gb_per_s == pytest.approx(rate, rel=1e-3)


@given(
    backward=share_of_time, wire=share_of_time, alpha=st.floats(0, 0.1), buckets=st.integers(1, 64)
)
def test_what_backward_cannot_hide(backward, wire, alpha, buckets):
    exposed = exposed_s(backward, wire, alpha, buckets)
    each = alpha + wire / buckets
    assert exposed >= each - 1e-9  # the last bucket always sticks out
    assert exposed <= exposed_s(backward, wire, alpha, 1) + (buckets - 1) * alpha + 1e-9
    assert exposed >= wire + buckets * alpha - backward - 1e-9


@given(st.integers(2, 64), st.floats(0, 1))
def test_a_sparse_all_reduce_is_never_cheaper_than_its_blocks(ranks, density):
    assert share(0.0, ranks) == 0.0
    assert share(density, ranks) >= density * ranks / (2 * (ranks - 1)) - 1e-12


@given(st.floats(1e-3, 1e6), st.integers(2, 4096))
def test_the_sum_of_all_ranks_fits_an_integer(largest, ranks):
    scale = scale_for(largest, ranks)
    assert (largest * scale + 0.5) * ranks < 2**31


@settings(max_examples=20)
@given(st.sampled_from([2, 4, 8]))
def test_zigzag_is_even_and_contiguous_is_not(ranks):
    tokens = 64 * ranks
    woven, straight = pairs(tokens, ranks, True), pairs(tokens, ranks, False)
    assert sum(woven) == sum(straight) == tokens * (tokens + 1) // 2
    assert len(set(woven)) == 1
    assert max(straight) * ranks / sum(straight) == pytest.approx(
        contiguous_excess(ranks), rel=0.02
    )


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_formula_is_the_simulators_bubble(name):
    line = simulate(schedule(name, 4, 8), Costs())
    assert line.bubble == pytest.approx(formula(name, 4, 8))


def test_sleeping_ranks_do_not_wait_for_ever():
    never = Schedule("broken", 1, ((), (Action("F", 0, 0),)))  # the first stage does nothing
    assert idle_share(never, Costs(), 0.001, timeout_s=0.2) == 1.0
