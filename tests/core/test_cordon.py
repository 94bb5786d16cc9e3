"""Nodes that fail too often are left out, for a while, and with a reason."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core import cordon
from cairn.core.cordon import Cordons
from cairn.core.errors import DataError


def test_the_third_strike_takes_a_node_out_until_its_time_is_over():
    found = Cordons()
    for hour in (0, 1, 2):
        assert found.excluded(3600.0 * hour) == {}
        found = found.strike("n1", 3600.0 * hour, "Xid 79", within_s=86_400)
    assert found.excluded(7200) == {"n1": "3 failures; the last: Xid 79"}
    assert found.excluded(7200 + 86_401) == {}
    assert found.lift("n1", 7300.0) == Cordons(lifted={"n1": 7300.0})


def test_old_strikes_are_forgotten():
    found = Cordons().strike("n1", 0, "a").strike("n1", 10, "b").strike("n1", 90_000, "c")
    assert found.excluded(90_001) == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 1e6)), max_size=20))
def test_nobody_is_out_with_fewer_strikes_than_it_takes(strikes):
    found = Cordons()
    for node, at in sorted(strikes, key=lambda pair: pair[1]):
        found = found.strike(node, at, "x", most=3)
    for node in found.excluded(1e6):
        assert sum(name == node for name, _ in strikes) >= 3


def test_it_is_kept_in_a_file(tmp_path):
    path = tmp_path / "x" / "cordon.json"
    assert cordon.load(path) == Cordons()
    found = Cordons().cordon("n2", 5.0, "disk")
    cordon.save(path, found)
    assert cordon.load(path) == found
    path.write_text("[")
    with pytest.raises(DataError, match="damaged"):
        cordon.load(path)
