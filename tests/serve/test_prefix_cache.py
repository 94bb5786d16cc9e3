"""Who finds whose pages: full ones of the same prefix and salt, and only while they hold it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.engine.block_manager import BlockManager
from cairn.serve.engine.pieces import Piece
from cairn.serve.engine.prefix_cache import Entry, PrefixCache
from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams

SIZE = 4


def make(prompt, salt="", **params) -> Request:
    return Request("r", list(prompt), SamplingParams(**params), salt=salt)


def filled(blocks: BlockManager, prompt, salt="") -> Request:
    """A request that has computed its whole prompt."""
    request = make(prompt, salt)
    assert blocks.allocate(request, len(request.prompt)) is not None
    blocks.publish(request, len(request.prompt))
    request.computed = len(request.prompt)
    return request


def test_only_full_pages_are_found_and_one_token_stays_to_compute():
    blocks = BlockManager(20, SIZE)
    first = filled(blocks, range(10))
    for length, pages in ((4, 0), (5, 1), (8, 1), (9, 2), (10, 2), (14, 2)):
        assert blocks.prefix.find(make(range(length))).tables == [first.blocks[:pages]]


def test_one_different_token_hides_everything_behind_it():
    blocks = BlockManager(20, SIZE)
    first = filled(blocks, range(16))
    other = [*range(6), 99, *range(7, 16)]
    assert blocks.prefix.find(make([*other, 1])).tables == [first.blocks[:1]]
    assert blocks.prefix.find(make([99, *range(1, 16)])).tables == [[]]


def test_the_same_tokens_behind_another_page_are_another_page():
    """The hash stands for the whole prefix, not for its own tokens."""
    blocks = BlockManager(20, SIZE)
    first = filled(blocks, [1, 2, 3, 4, 1, 2, 3, 4, 5])
    assert blocks.prefix.find(make([1, 2, 3, 4, 5])).tables == [first.blocks[:1]]
    assert blocks.prefix.find(make([9, 9, 9, 9, 1, 2, 3, 4, 5])).tables == [[]]


def test_a_gap_hides_everything_behind_it():
    blocks = BlockManager(20, SIZE)
    first = filled(blocks, range(16))
    blocks.forget(first.blocks[1:2])
    assert blocks.prefix.find(make(range(17))).tables == [first.blocks[:1]]


def test_salts_do_not_meet():
    blocks = BlockManager(20, SIZE)
    plain, salted = filled(blocks, range(9)), filled(blocks, range(9), salt="tenant")
    assert set(plain.blocks).isdisjoint(salted.blocks)
    assert blocks.prefix.find(make(range(9))).tables == [plain.blocks[:2]]
    assert blocks.prefix.find(make(range(9), salt="tenant")).tables == [salted.blocks[:2]]
    assert blocks.prefix.find(make(range(9), salt="somebody else")).tables == [[]]
    # The salt changes the first page; those behind it differ because their parent does.
    assert set(plain.hashes).isdisjoint(salted.hashes)


def test_pages_of_a_prompt_that_is_seen_both_ways_belong_to_all_its_pictures():
    blocks = BlockManager(20, SIZE)

    def shown(second: bytes) -> Request:
        request = make(range(12))
        request.pieces = [Piece(0, 3, b"1", sees="prompt"), Piece(8, 3, second, sees="prompt")]
        return request

    first = shown(b"2")
    assert blocks.allocate(first, 12) is not None
    blocks.publish(first, 12)
    assert blocks.prefix.find(shown(b"2")).tables == [first.blocks[:2]]
    assert blocks.prefix.find(shown(b"3")).tables == [[]]


def test_prompt_logprobs_need_every_token_computed():
    blocks = BlockManager(20, SIZE)
    filled(blocks, range(9))
    assert blocks.prefix.find(make(range(9), prompt_logprobs=0)).tables == [[]]


def test_switched_off_it_finds_and_keeps_nothing():
    blocks = BlockManager(20, SIZE, prefix_caching=False)
    request = filled(blocks, range(9))
    assert blocks.prefix.find(make(range(9))).tables == [[]]
    assert request.hashes == []
    assert len(blocks.prefix) == 0


def test_a_decoded_page_is_found_exactly_when_it_is_full():
    blocks = BlockManager(20, SIZE)
    request = filled(blocks, range(6))
    blocks.allocate(request, 8)
    for token in (70, 71):
        assert request.published == 1
        request.outputs.append(token)
        blocks.publish(request, request.known)
    assert request.published == 2
    assert blocks.prefix.find(make([*range(6), 70, 71, 5])).tables == [request.blocks[:2]]


def test_hashes_of_prompt_and_outputs_are_those_of_one_long_prompt():
    blocks = BlockManager(40, SIZE)
    request = filled(blocks, range(6))
    request.outputs += [70, 71, 72, 73, 74, 75, 76]
    blocks.allocate(request, 13)
    blocks.publish(request, 13)
    long = filled(BlockManager(40, SIZE), [*range(6), *request.outputs])
    assert request.hashes == long.hashes


def test_two_pages_may_hold_the_same_and_either_is_found_without_the_other():
    blocks = BlockManager(20, SIZE)
    one, two = make(range(8)), make(range(8))
    for request in (one, two):
        blocks.allocate(request, 8)
    for request in (one, two):
        blocks.publish(request, 8)
    assert one.blocks != two.blocks
    asking = make(range(8 + 1))
    assert blocks.prefix.find(asking).tables == [one.blocks]
    for page in one.blocks:
        blocks.prefix.drop(page)
    assert blocks.prefix.find(asking).tables == [two.blocks]
    for page in two.blocks:
        blocks.prefix.drop(page)
    assert blocks.prefix.find(asking).tables == [[]]
    assert len(blocks.prefix) == 0


def test_a_page_that_was_never_filled_can_be_forgotten():
    blocks = BlockManager(20, SIZE)
    request = filled(blocks, range(9))
    blocks.forget(request.blocks[1:2])
    assert blocks.prefix.find(make(range(9))).tables == [request.blocks[:1]]
    blocks.free(request)
    blocks.forget([1, 2, 3])
    blocks.check_integrity()
    assert blocks.usage().cached == 0


def test_hits_are_counted_once_per_request():
    blocks = BlockManager(20, SIZE)
    filled(blocks, range(9))
    request = make(range(11))
    blocks.allocate(request, 11)
    assert request.cached == 8
    blocks.free(request)  # preempted
    request.ledger.preemptions += 1
    blocks.allocate(request, 11)
    statistics = blocks.prefix.statistics
    assert (statistics.requests, statistics.tokens, statistics.hits) == (2, 9 + 11, 8)


def test_a_damaged_index_is_noticed():
    cache = PrefixCache(4, SIZE)
    cache._entry_of[2] = Entry(0, b"x")
    with pytest.raises(ValueError, match="differ"):
        cache.check_integrity()


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=8),
    st.lists(st.sampled_from(["", "a"]), min_size=8, max_size=8),
    st.integers(1, 4),
)
def test_what_is_found_is_what_brute_force_finds(prompts, salts, size):
    """Against a dictionary of whole prefixes in place of the chained hashes."""
    blocks = BlockManager(200, size)
    holds: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for prompt, salt in zip(prompts, salts, strict=False):
        request = make(prompt, salt)
        expected = []
        for end in range(size, len(prompt), size):
            pages = holds.get((salt, tuple(prompt[:end])))
            if pages is None:
                break
            expected.append(pages[0])
        assert blocks.prefix.find(request).tables == [expected]
        blocks.allocate(request, len(prompt))
        blocks.publish(request, len(prompt))
        for page, end in zip(request.blocks, range(size, len(prompt) + 1, size), strict=False):
            kept = holds.setdefault((salt, tuple(prompt[:end])), [])
            if page not in kept:
                kept.append(page)
        blocks.check_integrity()
