"""The collector is still inside, and as it was outside, whatever happened."""

import gc
import weakref

import pytest

from cairn.core.collector import quiet_collector


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.myself = self


def test_nothing_is_collected_inside_and_all_of_it_afterwards():
    with quiet_collector():
        assert not gc.isenabled()
        ghost = weakref.ref(Node())
        for _ in range(3000):
            Node()  # enough to have a collector run several times
        assert ghost() is not None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert ghost() is None


def test_one_that_was_off_stays_off():
    gc.disable()
    try:
        with pytest.raises(KeyError), quiet_collector():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()
