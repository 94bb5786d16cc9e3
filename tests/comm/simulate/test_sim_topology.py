"""Routes end where they should, take only links that are up, and what cannot be built is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cairn.comm.simulate.max_min_fairness import max_min
from cairn.comm.simulate.topology import NO_LINK, delay_us, links, most_ends, route, topology
from cairn.core.errors import ConfigError


@given(
    nodes=st.integers(2, 3000),
    radix=st.sampled_from([16, 32, 64]),
    salt=st.integers(0, 99),
    balance=st.sampled_from(["ecmp", "spread"]),
    over=st.sampled_from([1.0, 2.0, 4.0]),
    data=st.data(),
)
def test_a_route_goes_up_as_far_as_it_must_and_down_to_its_target(
    nodes, radix, salt, balance, over, data
):
    tiers = 2 if nodes <= most_ends(2, radix) else 3
    if nodes > most_ends(3, radix):
        return
    top = topology(
        f"rail-{tiers}tier",
        nodes * 2,
        domain=2,
        radix=radix,
        balance=balance,
        oversubscription=over,
    )
    ends = st.integers(0, nodes - 1)
    pairs = data.draw(st.lists(st.tuples(ends, ends), min_size=1, max_size=20))
    source, target = (np.array(side) for side in zip(*pairs, strict=True))
    found, at = route(top, source, target, 0, salt), links(top)
    assert (found[:, 0] == at.nic_up + source).all()
    assert (found[:, 5] == at.nic_down + target).all()
    away = source // top.below != target // top.below
    far = source // top.below // top.leaves_per_pod != target // top.below // top.leaves_per_pod
    assert ((found[:, 1] != NO_LINK) == away).all()
    assert ((found[:, 4] != NO_LINK) == away).all()
    assert ((found[:, 2] != NO_LINK) == far).all()
    assert found.max() < len(at.gb_per_s)
    # Up through spine u means down through spine u: that is how the cores are cabled.
    ups = top.choices[0]
    assert (((found[away, 1] - at.leaf_up) % ups) == ((found[away, 4] - at.leaf_down) % ups)).all()
    assert (route(top, source, target, 0, salt) == found).all()
    assert (delay_us(top, source, target)[far] > delay_us(top, source, target).min() - 1e-9).all()


def test_flows_avoid_links_that_are_down_and_say_when_there_is_no_other():
    top = topology("rail-2tier", 512, domain=4)
    at = links(top)
    source, target = np.arange(128), (np.arange(128) + 64) % 128
    dead = np.zeros(len(at.gb_per_s), dtype=bool)
    first = route(top, source, target, 0)
    dead[first[0, 1]] = True
    again = route(top, source, target, 0, dead=dead)
    assert not dead[again].any()
    dead[at.leaf_up : at.leaf_down] = True
    with pytest.raises(ConfigError, match="no path is left"):
        route(top, source, target, 0, dead=dead)


def test_spreading_uses_all_uplinks_and_oversubscription_takes_bandwidth_away():
    both = [
        links(topology("rail-2tier", 512, domain=4, balance=b, oversubscription=2.0))
        for b in ("ecmp", "spread")
    ]
    ups = [at.gb_per_s[at.leaf_up : at.leaf_down].sum() for at in both]
    assert ups[0] == pytest.approx(ups[1])
    assert ups[0] == pytest.approx(0.5 * both[0].gb_per_s[: both[0].nic_down].sum())


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (dict(name="rail-2tier", gpus=98304), "12,288 NICs .* 2 tier.* join 2,048"),
        (dict(name="torus", gpus=8), "unknown topology"),
        (dict(name="rail-1tier", gpus=1), "nothing to exchange"),
        (dict(name="rail-1tier", gpus=12), "do not fill nodes of 8"),
        (dict(name="rail-1tier", gpus=16, nic_gb_per_s=0), "network of 0"),
        (dict(name="rail-1tier", gpus=16, nvlink_gb_per_s=-1), "NVLink of -1"),
        (dict(name="rail-1tier", gpus=16, radix=7), "7 ports"),
        (dict(name="rail-1tier", gpus=16, oversubscription=0.5), "0.5:1"),
        (dict(name="rail-1tier", gpus=16, paths=0), "0 paths"),
        (dict(name="rail-3tier", gpus=8 << 24), "do not fit"),
    ],
)
def test_what_cannot_be_built_is_refused_with_the_reason(asked, words):
    with pytest.raises(ConfigError, match=words) as caught:
        topology(**asked)
    assert caught.value.hint


def test_the_hint_names_a_switch_that_would_do():
    with pytest.raises(ConfigError) as caught:
        topology("rail-2tier", 98304)
    radix = int(caught.value.hint.split("--radix ")[1].rstrip(")"))
    assert topology("rail-2tier", 98304, radix=radix).nodes == 12288


def slowly_filled(paths: list[list[int]], capacity: list[float]) -> list[float]:
    """Progressive filling, one link at a time, as the textbook has it."""
    rate, left = [0.0] * len(paths), list(capacity)
    open_ = set(range(len(paths)))
    while open_:
        loads = {
            link: [flow for flow in open_ if link in paths[flow]] for link in range(len(capacity))
        }
        link = min(
            (one for one in loads if loads[one]), key=lambda one: left[one] / len(loads[one])
        )
        share = left[link] / len(loads[link])
        for flow in list(loads[link]):
            rate[flow] = share
            open_.discard(flow)
            for used in paths[flow]:
                left[used] -= share
    return rate


@settings(max_examples=60)
@given(st.data())
def test_shares_are_max_min_fair(data):
    count = data.draw(st.integers(1, 6))
    capacity = [data.draw(st.floats(1, 100)) for _ in range(count)]
    some = st.lists(st.integers(0, count - 1), min_size=1, max_size=3, unique=True)
    paths = data.draw(st.lists(some, min_size=1, max_size=8))
    table = np.array([[*path, *[NO_LINK] * (3 - len(path))] for path in paths])
    rate = max_min(table, np.array(capacity))
    assert rate == pytest.approx(slowly_filled(paths, capacity), rel=1e-6)
    near = max_min(table, np.array(capacity), tolerance=0.05)
    load = np.zeros(count)
    for path, mine in zip(paths, near, strict=True):
        load[path] += mine
    assert (load <= np.array(capacity) * (1 + 1e-6)).all()  # a tolerance never overloads a link
    assert near.min() == pytest.approx(rate.min(), rel=1e-6)
