"""Pages are given out once, shared rightly, taken back whole, and found again as long as possible."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import RequestError
from cairn.serve.engine.block_manager import BlockManager, IntegrityError
from cairn.serve.engine.free_list import FreeList
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams

SIZE = 4


def make(prompt) -> Request:
    return Request("r", list(prompt), SamplingParams())


def run(blocks: BlockManager, prompt) -> Request:
    request = make(prompt)
    assert blocks.allocate(request, len(request.prompt)) is not None
    blocks.publish(request, len(request.prompt))
    request.computed = len(request.prompt)
    return request


def free_order(blocks: BlockManager) -> list[int]:
    return list(blocks.pool.free)


# -- the free list -----------------------------------------------------------------------------------


def test_the_free_list_gives_pages_in_order_and_never_the_null_page():
    free = FreeList(5)
    assert list(free) == [1, 2, 3, 4]
    assert [free.pop() for _ in range(4)] == [1, 2, 3, 4]
    assert len(free) == 0
    with pytest.raises(ValueError, match="page 0"):
        free.pop()


def test_pages_leave_the_middle_and_enter_both_ends():
    free = FreeList(6)
    free.remove(3)
    assert list(free) == [1, 2, 4, 5]
    assert 3 not in free
    free.append(3)
    free.remove(1)
    free.prepend(1)
    assert list(free) == [1, 2, 4, 5, 3]
    assert 0 not in free
    free.check_integrity()


def test_a_page_is_never_free_twice():
    free = FreeList(4)
    for add in (free.append, free.prepend):
        with pytest.raises(ValueError, match="page 2 is free already"):
            add(2)
    free.remove(2)
    with pytest.raises(ValueError, match="page 2 is not free"):
        free.remove(2)
    with pytest.raises(ValueError, match="page 0"):
        free.append(0)


@given(
    st.lists(st.tuples(st.sampled_from(["pop", "remove", "append", "prepend"]), st.integers(1, 7)))
)
def test_the_free_list_behaves_like_a_list(operations):
    free, model = FreeList(8), list(range(1, 8))
    for name, page in operations:
        if name == "pop" and model:
            assert free.pop() == model.pop(0)
        elif name == "remove" and page in model:
            free.remove(page)
            model.remove(page)
        elif name in ("append", "prepend") and page not in model:
            getattr(free, name)(page)
            model.insert(0 if name == "prepend" else len(model), page)
        assert list(free) == model
        assert len(free) == len(model)
    free.check_integrity()


# -- giving out and taking back ----------------------------------------------------------------------


def test_a_prompt_takes_the_pages_it_needs_and_decoding_one_more_at_a_time():
    blocks = BlockManager(10, SIZE)
    request = make(range(7))
    assert blocks.allocate(request, 7) == [1, 2]
    assert blocks.allocate(request, 8) == []
    assert blocks.allocate(request, 9) == [3]
    assert request.blocks == [1, 2, 3]
    assert blocks.usage().used == 3
    blocks.free(request)
    assert request.blocks == []
    assert blocks.usage().used == 0
    blocks.free(request)  # nothing to give back: nothing happens
    blocks.check_integrity()


def test_hit_miss_and_the_order_of_eviction():
    """Ten pages, two requests that share three: partial pages go first, shared heads last."""
    blocks = BlockManager(11, SIZE)
    one = run(blocks, range(14))  # 3 full, 1 partial
    two = run(blocks, [*range(12), 50, 51, 52, 53, 54])  # shares 3, then 1 full, 1 partial
    assert one.blocks == [1, 2, 3, 4]
    assert two.blocks == [1, 2, 3, 5, 6]
    assert two.cached == 12
    blocks.free(one)
    assert free_order(blocks) == [4, 7, 8, 9, 10]  # the shared ones are still in use
    blocks.free(two)
    assert free_order(blocks) == [6, 4, 7, 8, 9, 10, 5, 3, 2, 1]
    assert blocks.usage().cached == 4
    # A third that shares two takes them out of the middle, and the rest from the front.
    three = run(blocks, [*range(8), 60, 61, 62, 63, 64])
    assert three.blocks == [1, 2, 6, 4]
    assert free_order(blocks) == [7, 8, 9, 10, 5, 3]
    blocks.check_integrity()


def test_the_oldest_prefix_is_evicted_first():
    blocks = BlockManager(7, SIZE)
    for start in (0, 100, 200):
        blocks.free(run(blocks, range(start, start + 8)))
    assert free_order(blocks) == [2, 1, 4, 3, 6, 5]
    run(blocks, range(300, 309))
    assert not blocks.prefix.find(make([*range(9)])).pages
    assert blocks.prefix.find(make([*range(100, 108), 0])).tables == [[3]]
    assert blocks.prefix.find(make([*range(200, 208), 0])).tables == [[5, 6]]


def test_a_reused_page_has_lost_its_hash():
    blocks = BlockManager(3, SIZE)
    blocks.free(run(blocks, range(8)))
    partial = run(blocks, [90, 91, 92, 93, 94])  # both pages hold something else now
    assert sorted(partial.blocks) == [1, 2]
    assert not blocks.prefix.find(make(range(9))).pages
    blocks.free(partial)
    assert blocks.usage().cached == 1
    blocks.check_integrity()


def test_found_pages_are_not_evicted_for_the_rest_of_the_same_prompt():
    blocks = BlockManager(5, SIZE)
    blocks.free(run(blocks, range(8)))
    assert free_order(blocks) == [3, 4, 2, 1]
    request = make(range(16))
    assert blocks.allocate(request, 16) == [1, 2, 3, 4]
    assert request.computed == 8


def test_an_allocation_that_fails_touches_nothing():
    blocks = BlockManager(6, SIZE)
    holder = run(blocks, range(100, 108))
    blocks.free(run(blocks, range(8)))
    before = (free_order(blocks), list(blocks.pool.holders), blocks.usage())
    request = make(range(17))  # finds 2, which are free, and needs 3 more: 1 is left
    assert blocks.allocate(request, 17) is None
    assert (free_order(blocks), list(blocks.pool.holders), blocks.usage()) == before
    assert (request.blocks, request.computed, request.cached) == ([], 0, 0)
    assert blocks.prefix.statistics.requests == 2
    blocks.free(holder)
    assert blocks.allocate(request, 17) is not None
    blocks.check_integrity()


def test_pages_in_use_by_others_cost_nothing_to_share():
    blocks = BlockManager(4, SIZE)
    run(blocks, range(8))
    request = make(range(9))
    assert blocks.free_pages == 1
    assert blocks.allocate(request, 9) == [1, 2, 3]
    assert blocks.free_pages == 0


def test_reset_is_refused_while_pages_are_in_use():
    blocks = BlockManager(10, SIZE)
    request = run(blocks, range(9))
    with pytest.raises(RequestError, match="3 of 9 pages") as caught:
        blocks.reset()
    assert caught.value.hint
    blocks.free(request)
    blocks.reset()
    assert not blocks.prefix.find(make(range(9))).pages
    assert blocks.usage().cached == 0
    blocks.check_integrity()


def test_damage_is_noticed():
    def broken(damage) -> None:
        blocks = BlockManager(6, SIZE)
        request = run(blocks, range(9))
        damage(blocks, request)
        with pytest.raises(IntegrityError):
            blocks.check_integrity()

    broken(lambda blocks, request: request.blocks.append(4))  # a free page in a table
    broken(lambda blocks, request: request.blocks.pop())  # a page lost
    broken(lambda blocks, request: request.blocks.append(0))
    broken(lambda blocks, request: blocks.pool.free.append(1))  # in use and free
    broken(lambda blocks, request: blocks.pool.free.remove(5))  # neither
    broken(lambda blocks, request: blocks.pool.holders.__setitem__(1, 2))
    broken(lambda blocks, request: setattr(blocks.pool, "cached", 1))
    broken(lambda blocks, request: setattr(blocks.pool.free, "length", 9))
    broken(lambda blocks, request: blocks.prefix._pages_of.clear())


@pytest.mark.parametrize("size", [1, 2, 4, 16])
def test_pages_never_overlap_after_eviction(size):
    """Whatever was evicted in between, tables of requests that share nothing share no page."""
    blocks = BlockManager(13, size)
    old = [run(blocks, range(100 * n, 100 * n + 3 * size)) for n in range(4)]
    for request in old[1:]:
        blocks.free(request)
    new = run(blocks, range(900, 900 + 8 * size + 1))
    assert len(set(new.blocks)) == 9
    assert set(new.blocks).isdisjoint(old[0].blocks)
    blocks.check_integrity()
