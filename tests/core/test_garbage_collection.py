"""The collector is still inside, and as it was outside, whatever happened."""

import gc
import weakref

import pytest
import standing_heap

from cairn.core.garbage_collection import held_collector, quiet_collector


@pytest.fixture(autouse=True)
def real_collector():
    with standing_heap.real_collector():
        yield


class Node:
    """Refers to itself, so that only the collector can free it."""

    def __init__(self) -> None:
        self.myself = self


@pytest.mark.parametrize("still", [quiet_collector, held_collector])
def test_nothing_is_collected_inside_and_all_of_it_afterwards(still):
    with still():
        assert not gc.isenabled()
        ghost = weakref.ref(Node())
        for _ in range(3000):
            Node()  # enough to have a collector run several times
        assert ghost() is not None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert ghost() is None


@pytest.mark.parametrize("still", [quiet_collector, held_collector])
def test_one_that_was_off_stays_off(still):
    gc.disable()
    try:
        with pytest.raises(KeyError), still():
            raise KeyError
        assert not gc.isenabled()
    finally:
        gc.enable()
