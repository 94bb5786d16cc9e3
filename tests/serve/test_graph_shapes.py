"""Which graph a step takes, and whether what the host sends has room: arithmetic, without a GPU."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import greedy, prompt_of, submit, tiny_engine

from cairn.models.cache import CacheGroup
from cairn.serve.engine.batch import Batch, Layout, aligned, most_pages, words_of
from cairn.serve.engine.cuda_graph import (
    MOST_MIXED,
    MOST_NEW_PAGES,
    Graphs,
    cascade_sizes,
    decode_sizes,
    mixed_shape,
    mixed_sizes,
    shape_of,
    token_sizes,
)
from cairn.serve.engine.eager_steps import large_shapes
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.step import Chunk

FULL, WINDOW, STATE = CacheGroup(), CacheGroup("window", 512), CacheGroup("state")
GROUPS = st.sampled_from([(FULL,), (FULL, WINDOW, WINDOW), (FULL, STATE)])


@st.composite
def steps(draw):
    rows, page_size = draw(st.integers(1, 300)), draw(st.sampled_from([16, 64]))
    budget = draw(st.integers(rows, 9000))
    context = draw(st.integers(64, 4096))
    shared = draw(st.sampled_from([0, budget, draw(st.integers(rows, budget))]))
    limits = Limits(
        rows=rows,
        step_tokens=budget,
        context=context,
        pages=draw(st.integers(2, 5000)),
        page_size=page_size,
        vocabulary=9,
        mixed_step_tokens=shared,
        groups=draw(GROUPS),
        states=9,
    )
    chunks = []
    for _ in range(draw(st.integers(1, min(rows, 12)))):
        left = budget - sum(chunk.count for chunk in chunks)
        if left < 1:
            break
        count = draw(st.integers(1, min(left, context)))
        start = draw(st.integers(0, context - count))
        places = draw(st.integers(0, -(-(start + count) // page_size)))
        pages = range(places * limits.page_tables)
        request = Request(0, [1], SamplingParams())
        chunks.append(Chunk(request, start, count, 0, pages, draw(st.booleans())))
    return limits, chunks


def layout_decodes(layout):
    return layout == Layout.decode(layout.sequences)


@given(steps(), st.booleans())
def test_a_shape_holds_its_step_and_has_room(step, shared):
    limits, chunks = step
    tables = limits.page_tables
    exact = Layout.of(chunks, tables)
    assert sum(map(aligned, exact.sizes(tables))) <= words_of(limits)
    shape = shape_of(chunks, limits, shared)
    if shape is None:
        decodes = exact.one_each and exact.samples == exact.sequences
        many_pages = exact.pages > (
            exact.sequences if decodes else min(MOST_NEW_PAGES, most_pages(limits))
        )
        limited = limits.mixed_step_tokens and exact.tokens > mixed_sizes(limits)[-1]
        many_rows = exact.tokens > MOST_MIXED and exact.sequences + 1 > limits.rows
        assert many_pages or limited or many_rows
        return
    assert shape.shared == (shared and shape.layout.tokens <= MOST_MIXED)
    most = limits.mixed_step_tokens
    assert not 0 < most < min(exact.tokens, MOST_MIXED)  # takes longer than its launches
    layout = shape.layout
    assert sum(map(aligned, layout.sizes(tables))) <= words_of(limits)
    assert all(room >= need for room, need in zip(layout, exact, strict=True))
    padding = layout.padding(exact.sequences, exact.tokens)
    assert sum(padding) == layout.tokens - exact.tokens
    large = layout.tokens > MOST_MIXED
    assert shape.fresh == (large and all(chunk.start == 0 for chunk in chunks))
    if not large and not layout.one_each:
        alike = mixed_shape(layout.tokens, limits)  # tokens alone tell it from others
        assert shape == alike._replace(shared=shared)
        assert layout.tokens - exact.tokens < max(256, exact.tokens // 8)


@given(st.integers(1, 2000))
def test_sizes_rise_to_the_limit(most):
    limits = Limits(
        rows=1,
        step_tokens=2 * most,
        context=64,
        pages=9,
        page_size=16,
        vocabulary=9,
        mixed_step_tokens=most,
    )
    for sizes in (
        decode_sizes(most),
        cascade_sizes(most),
        token_sizes(most),
        mixed_sizes(limits),
    ):
        assert sizes[-1] == most
        assert list(sizes) == sorted(set(sizes))


def test_many_requests_may_begin_with_the_same_pages():
    """Together they then show far more pages than the cache has."""
    engine = tiny_engine("llama", rows=16, pages=25, budget=16)
    shared = prompt_of(8 * 16, seed=3)
    submit(engine, [[*shared, 1]], max_tokens=1)
    engine.run()
    prompts = [[*shared, seed] for seed in range(16)]
    requests = submit(engine, prompts, max_tokens=3)
    engine.step()
    assert sum(len(request.blocks) for request in requests) > 26 + 16
    engine.run()
    assert [r.outputs for r in requests[:3]] == [greedy("llama", p, 3) for p in prompts[:3]]


@given(st.integers(1, 300), st.integers(1, 9), st.data())
def test_rows_with_drafts_fit_a_graph_of_uniform_rows(rows, drafts, data):
    """Whatever number of drafts each row has; a step without any is the ordinary decode step."""
    limits = Limits(
        rows=rows,
        step_tokens=8192,
        context=512,
        pages=5000,
        page_size=16,
        vocabulary=9,
        drafts=drafts,
    )
    counts = data.draw(st.lists(st.integers(0, drafts), min_size=1, max_size=min(rows, 20)))
    request = Request(0, [1], SamplingParams())
    chunks = [Chunk(request, 40, 1 + n, 3, (), 1 + n, [0] * n) for n in counts]
    shape = shape_of(chunks, limits)
    assert shape is not None
    exact = Layout.of(chunks, 1, drafts=True)
    assert shape.layout.verifies == any(counts)
    assert all(room >= need for room, need in zip(shape.layout, exact, strict=True))
    assert (
        sum(shape.layout.padding(len(chunks), exact.tokens)) == shape.layout.tokens - exact.tokens
    )
    assert sum(shape.layout.sizes(1)) <= words_of(limits)
    if not any(counts):
        assert layout_decodes(shape.layout)


@given(st.integers(1, 300), st.integers(9, 40000), st.integers(64, 9000))
def test_large_steps_of_a_dry_run_have_room(rows, budget, context):
    limits = Limits(
        rows=min(rows, budget),
        step_tokens=budget,
        context=context,
        pages=500,
        page_size=16,
        vocabulary=9,
    )
    for shape in large_shapes(limits):
        layout = shape.layout
        assert mixed_sizes(limits)[-1] - 5 <= layout.tokens <= budget
        assert layout.sequences <= limits.rows
        assert layout.max_query <= max(2, context)
        assert sum(map(aligned, layout.sizes(1))) <= words_of(limits)
        assert sum(layout.padding(0, 0)) == layout.tokens


def test_what_hides_its_own_launches_has_no_graph():
    """A large step is captured when it comes for the second time, unless it takes longer than its launches."""
    limits = Limits(
        rows=64, step_tokens=16384, context=8192, pages=5000, page_size=64, vocabulary=9
    )
    request = Request(0, [1], SamplingParams())
    for largest, captured in ((0, 1), (6000, 0), (9000, 1)):
        graphs = Graphs(limits, lambda shape: None, lambda shape: None, largest)
        made = []
        graphs._capture = lambda shape, made=made: made.append(shape)
        step = [Chunk(request, 0, 4000, 0, (), 1), Chunk(request, 0, 3000, 1, (), 1)]
        graphs.ready(step)
        assert graphs.is_settled == (not captured)  # it waits to come again
        for _ in range(2):
            graphs.ready(step)
        assert graphs.is_settled
        assert len(made) == captured
        graphs.ready([Chunk(request, 0, 100, 0, (), 1)])  # a common one: at once
        assert len(made) == captured + 1


def test_a_step_that_verifies_draws_behind_every_token_in_their_order():
    """Its graph takes the logits of all tokens as they lie, without looking up which are drawn behind."""
    limits = Limits(
        rows=6, step_tokens=64, context=64, pages=40, page_size=16, vocabulary=9, drafts=3
    )
    chunks = []
    for row, count in enumerate((4, 1, 3)):
        request = Request(row, [1, 2], SamplingParams(max_tokens=9))
        request.row, request.total = row, 3
        chunks.append(Chunk(request, 2, count, 0, (), count, (5,) * (count - 1), True))
    shape = shape_of(chunks, limits)
    staged = Batch(limits, "cpu").stage(chunks, shape.layout)
    assert staged.each_drawn
    assert staged.sample_at_S[:8].tolist() == list(range(8))
    assert staged.sample_rows_S.tolist() == [0] * 4 + [1] + [2] * 3 + [-1] * 8
    assert not Batch(limits, "cpu").stage(chunks).each_drawn
