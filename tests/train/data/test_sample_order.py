"""Order, blends and shares: bijections, proportions and streams, for any sizes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError
from cairn.train.data.blend import MAX_PARTS, Pattern, schedule, whole_parts
from cairn.train.data.counter_rng import Dice, mix
from cairn.train.data.shuffle import permute, shuffled
from cairn.train.data.source import samples, share


@given(items=st.integers(1, 800), key=st.integers(0, 2**64 - 1))
def test_the_order_is_a_bijection_for_any_number_of_items(items, key):
    assert sorted(permute(place, items, key) for place in range(items)) == list(range(items))


@given(number=st.integers(0, 10**15), items=st.integers(1, 10**12), seed=st.integers(0, 2**32))
def test_any_place_of_a_huge_order_is_found_at_once(number, items, seed):
    epoch, item = shuffled(number, items, seed)
    assert epoch == number // items
    assert 0 <= item < items
    assert shuffled(number, items, seed) == (epoch, item)


def test_epochs_and_seeds_give_orders_of_their_own():
    orders = {
        tuple(shuffled(epoch * 50 + place, 50, seed)[1] for place in range(50))
        for epoch in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_well_mixed():
    """Chi-squared over place and item in tenths: a shuffle that keeps neighbours together fails."""
    counts = Counter(
        (place // 100, permute(place, 1000, key) // 100)
        for key in range(20)
        for place in range(1000)
    )
    chi = sum((counts[i, j] - 200) ** 2 / 200 for i in range(10) for j in range(10))
    assert chi < 150  # 81 degrees of freedom: 1 in 10^5 by chance; the keys are fixed
    follows = sum(
        abs(permute(place, 1000, 5) - permute(place + 1, 1000, 5)) == 1 for place in range(999)
    )
    assert follows < 15


def test_the_order_never_changes_between_versions():
    """A checkpoint from last year must go on with the same samples."""
    assert mix(1, 2, 3) == 0xD306214C1FE59365
    assert [shuffled(i, 10, 7)[1] for i in range(12)] == [7, 0, 2, 4, 3, 5, 9, 6, 1, 8, 3, 5]


@given(
    per_step=st.sampled_from([8, 16, 40]),
    items=st.integers(1, 500),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 6), min_size=3, max_size=3),
)
def test_the_stream_is_the_same_when_ranks_go_4_8_2(per_step, items, seed, cuts):
    consumed, seen = 0, []
    for ranks, steps in zip((4, 8, 2), cuts, strict=True):
        for _ in range(steps):
            for rank in range(ranks):
                seen += [shuffled(n, items, seed) for n in share(consumed, rank, ranks, per_step)]
            consumed += per_step
    assert seen == [shuffled(n, items, seed) for n in range(sum(cuts) * per_step)]


def test_a_rank_takes_its_slice_of_a_step():
    assert list(samples(step=3, rank=1, ranks=2, per_step=8)) == [28, 29, 30, 31]
    with pytest.raises(ConfigError, match="6 samples per step do not divide over 4 data ranks"):
        samples(0, 0, 4, 6)
    with pytest.raises(ConfigError, match="no data rank 4 of 4"):
        samples(0, 4, 4, 8)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=8))
def test_every_prefix_of_a_blend_is_within_one_of_its_weights(parts):
    period, counts = sum(parts), [0] * len(parts)
    for length, source in enumerate(schedule(parts), start=1):
        counts[source] += 1
        for count, part in zip(counts, parts, strict=True):
            assert abs(count * period - length * part) < period  # |count - n w| < 1, in integers
    assert counts == list(parts)


@given(
    st.lists(st.sampled_from([0.05, 0.1, 0.25, 0.3, 0.7, 1.0, 2.5, 7]), min_size=1, max_size=6),
    st.integers(0, 10**9),
)
def test_a_place_in_a_blend_is_found_without_counting(weights, start):
    pattern = Pattern(weights)
    start = start // pattern.period * pattern.period
    expected = [pattern.parts[source] * (start // pattern.period) for source in range(len(weights))]
    for number in range(start, start + min(3 * pattern.period, 500)):
        source, own = pattern.locate(number)
        assert own == expected[source]  # each source is read in order, nothing left out
        expected[source] += 1


def test_weights_become_parts_exactly_where_they_can():
    assert whole_parts([0.7, 0.2, 0.1]) == [7, 2, 1]
    assert whole_parts([3, 1]) == [3, 1]
    rounded = whole_parts([1 / 3, 1 / 7, 1e-9])
    assert sum(rounded) == MAX_PARTS
    assert min(rounded) == 1
    assert rounded[0] / rounded[1] == pytest.approx(7 / 3, rel=1e-3)


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0], [float("nan")], [float("inf"), 1]])
def test_weights_that_mean_nothing_are_refused(weights):
    with pytest.raises(ConfigError, match="weights of a blend"):
        whole_parts(weights)


def test_dice_are_fair_and_belong_to_their_item():
    throws = Counter(Dice(1, item).below(6) for item in range(6000))
    assert all(850 < throws[face] < 1150 for face in range(6))
    dice = Dice(3, 4)
    assert sorted(dice.pick_some(range(5), 5)) == [0, 1, 2, 3, 4]
    assert [Dice(3, 4).below(1000) for _ in range(2)] == [Dice(3, 4).below(1000)] * 2
    assert {Dice(0, i).between(2, 4) for i in range(100)} == {2, 3, 4}
