"""Which pages all requests of a step begin with."""

from hypothesis import given
from hypothesis import strategies as st

from cairn.serve.engine.request import Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.shared_prefix import SharedPrefix, common_pages
from cairn.serve.engine.step import Chunk

PAGE = 4


def decoding(blocks, computed=None):
    request = Request(0, [1], SamplingParams())
    request.blocks = list(blocks)
    request.computed = PAGE * len(blocks) if computed is None else computed
    return request


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=6, max_size=9), min_size=1, max_size=5),
    st.integers(0, 6),
)
def test_common_pages_are_those_that_all_tables_begin_with(tables, most):
    expected = 0
    while expected < most and len({table[expected] for table in tables}) == 1:
        expected += 1
    assert common_pages(tables, most) == expected


def test_the_page_that_is_being_written_is_nobody_elses():
    shared = SharedPrefix(PAGE, width=1, worth=1)
    assert shared.tokens([decoding([3, 7, 9]), decoding([3, 7, 8])]) == 2 * PAGE
    assert shared.tokens([decoding([3, 7], 5), decoding([3, 7], 8)]) == PAGE
    assert shared.tokens([decoding([3, 7, 9])]) == 0


def test_what_a_step_computes_itself_is_not_shared_yet():
    """A request finds pages that another fills in the same step."""
    shared = SharedPrefix(PAGE, width=1, worth=1)
    first, second = decoding([3, 7, 9]), decoding([3, 7, 8])
    chunks = [Chunk(first, 10, 1, 3, (), 1), Chunk(second, 8, 3, 0, (), 1)]
    assert shared.before(chunks) == 2 * PAGE
    assert shared.before([chunks[0], Chunk(second, 4, 7, 0, (), 1)]) == PAGE
    assert shared.before([chunks[0], Chunk(second, 3, 8, 0, (), 1)]) == 0


def test_a_little_is_not_worth_it():
    requests = [decoding([1, 2, n]) for n in range(3, 6)]
    read_less = 2 * 2 * PAGE * 10
    assert SharedPrefix(PAGE, width=10, worth=read_less).tokens(requests) == 2 * PAGE
    assert SharedPrefix(PAGE, width=10, worth=read_less + 1).tokens(requests) == 0


def test_a_request_that_comes_back_has_other_pages():
    shared = SharedPrefix(PAGE, width=1, worth=1)
    requests = [decoding([1, 2, 3]), decoding([1, 2, 4])]
    assert shared.tokens(requests) == 2 * PAGE
    requests[1].blocks = [5, 6, 7]
    shared.forget()
    assert shared.tokens(requests) == 0
