"""Prompts with pieces: the engine computes with rows of the arena where a plain forward has the same embeddings."""

import functools

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import at_rest, model, prompt_of, tiny_engine

from cairn.core.errors import RequestError
from cairn.models.attend import Cached, KVCache
from cairn.models.cache import CacheGroup
from cairn.models.transformer import PlainResidual, PlainStep, Transformer
from cairn.serve.engine.loop import Engine
from cairn.serve.engine.pieces import ArenaRows, Piece
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.request_checks import check_request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.engine.scheduler import Scheduler
from cairn.serve.engine.spans import reaches_of, whole_end
from cairn.serve.engine.step import Chunk

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
PLACEHOLDER = 3


def picture(seed: int, length: int, width: int) -> torch.Tensor:
    return torch.randn(length, width, generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def expected(net: Transformer, prompt: list[int], pieces: dict[int, torch.Tensor]) -> list[int]:
    """Token by token over the whole sequence: pieces are put over what was looked up and scaled."""
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        attend = Cached([KVCache(net.spec, len(tokens), torch.float32, "cpu")], [len(tokens)])
        positions_T = attend.positions_T()
        x_TD = net.embedding(torch.tensor(tokens)) * net.spec.embedding_scale
        for start, rows_RD in pieces.items():
            x_TD[start : start + len(rows_RD)] = rows_RD
        if net.position_embedding is not None:
            x_TD = x_TD + net.position_embedding(positions_T)
        step = PlainStep(attend, net.rotations(positions_T, attend, x_TD.dtype))
        hidden_TD, _ = net.through(PlainResidual(x_TD), step)
        tokens.append(int(net.logits(hidden_TD[-1:]).argmax()))
    return tokens[len(prompt) :]


def ask(
    engine: Engine, id: object, prompt: list[int], spans: dict[int, tuple[int, int]]
) -> Request:
    """`spans`: start -> (seed of the picture, length)."""
    pieces, rows = [], []
    for start, (seed, length) in spans.items():
        held = engine.scheduler.queues.arena.hold(b"picture %d" % seed, length)
        assert held is not None
        row, fresh = held
        if fresh:
            engine.runner.write_piece(row, picture(seed, length, engine.runner.model.spec.hidden))
        pieces.append(Piece(start, length, b"picture %d" % seed))
        rows.append(row)
    request = Request(id, prompt, GREEDY, pieces=pieces, piece_rows=rows)
    engine.add(request)
    return request


@functools.cache
def with_pictures(family: str, seeds: tuple[int, int]) -> list[int]:
    net = model(family)
    pieces = {
        at: picture(seed, 20, net.spec.hidden) for at, seed in zip((2, 30), seeds, strict=True)
    }
    return expected(net, prompt(), pieces)


def prompt() -> list[int]:
    return [
        *prompt_of(2, 1),
        *[PLACEHOLDER] * 20,
        *prompt_of(8, 2),
        *[PLACEHOLDER] * 20,
        *prompt_of(5, 3),
    ]


@pytest.fixture(autouse=True)
def _models_without_an_arena():
    yield
    for family in ("qwen3", "gemma3", "gpt2"):
        model(family).arena_RD = None  # models are shared between tests


@pytest.mark.parametrize("how", [{}, {"chunked": True}, {"plain": True, "overlap": True}], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "gpt2"])
def test_tokens_are_those_of_a_plain_forward(family, how):
    """Gemma scales what it looks up and GPT-2 adds positions: pieces get the second and not the first."""
    engine = tiny_engine(family, arena_rows=64, **how)
    one = ask(engine, 1, prompt(), {2: (1, 20), 30: (2, 20)})
    same = ask(engine, 2, prompt(), {2: (1, 20), 30: (2, 20)})
    plain = Request(3, prompt(), GREEDY)
    engine.add(plain)
    engine.run()
    assert one.outputs == same.outputs == with_pictures(family, (1, 2))
    assert plain.outputs == expected(model(family), prompt(), {}) != one.outputs
    assert engine.scheduler.queues.arena.held() == 0
    at_rest(engine)


def test_pages_are_found_by_what_pieces_show():
    engine = tiny_engine("qwen3", arena_rows=100)
    ask(engine, 1, prompt(), {2: (1, 20), 30: (2, 20)})
    engine.run()
    again = ask(engine, 2, prompt(), {2: (1, 20), 30: (2, 20)})
    second = ask(engine, 3, prompt(), {2: (1, 20), 30: (5, 20)})
    first = ask(engine, 4, prompt(), {2: (5, 20), 30: (2, 20)})
    plain = Request(5, prompt(), GREEDY)
    engine.add(plain)
    engine.run()
    assert (again.cached, second.cached, first.cached, plain.cached) == (48, 16, 0, 0)
    assert again.outputs == with_pictures("qwen3", (1, 2))
    assert second.outputs == with_pictures("qwen3", (1, 5))
    assert first.outputs == with_pictures("qwen3", (5, 2))


def test_a_preempted_request_is_computed_again_from_its_rows():
    """Rows belong to it until it ends: another piece finds no room instead of writing over them."""
    engine = tiny_engine("qwen3", arena_rows=40, chunked=True, prefix=False)
    request = ask(engine, 1, prompt(), {2: (1, 20), 30: (2, 20)})
    while len(request.outputs) < 3:
        engine.step()
    engine.scheduler.queues.preempt()
    assert engine.scheduler.queues.arena.hold(b"another", 20) is None
    engine.run()
    assert request.ledger.preemptions == 1
    assert request.outputs == with_pictures("qwen3", (1, 2))
    assert engine.scheduler.queues.arena.hold(b"another", 40) == (0, True)


def test_aborted_requests_hold_no_rows():
    engine = tiny_engine("qwen3", arena_rows=64)
    ask(engine, 1, prompt(), {2: (1, 20), 30: (2, 20)})
    assert engine.scheduler.queues.arena.held() == 40
    engine.abort(1)
    assert engine.scheduler.queues.arena.held() == 0


@pytest.mark.parametrize(
    ("pieces", "rows", "why"),
    [
        ([Piece(3, 4, b"a")], [62], "begins at row 62 of an arena of 64"),
        ([Piece(3, 4, b"a"), Piece(5, 4, b"b")], [0, 4], "the one before ends at 7"),
        ([Piece(50, 8, b"a")], [0], "the prompt at 55"),
        ([Piece(3, 4, b"a")], [-1], "row -1"),
    ],
)
def test_pieces_that_cannot_be_are_refused(pieces, rows, why):
    engine = tiny_engine("qwen3", arena_rows=64)
    with pytest.raises(RequestError, match=why):
        engine.add(Request(1, prompt(), GREEDY, pieces=pieces, piece_rows=rows))


@given(st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=60))
def test_rows_of_held_pieces_never_overlap(moves):
    """Hold and release in any order: whoever holds rows has them alone, and a fresh one is told to write."""
    arena, holders, written = ArenaRows(20), {}, {}
    for number, hold in moves:
        digest, length = b"%d" % number, 3 + number
        if hold and (found := arena.hold(digest, length)) is not None:
            first, fresh = found
            assert 0 <= first <= 20 - length
            rows = range(first, first + length)
            if fresh:
                assert not holders.get(digest)
                written |= dict.fromkeys(rows, digest)
            assert all(written[row] == digest for row in rows)
            holders[digest] = holders.get(digest, 0) + 1
        elif not hold and holders.get(digest):
            arena.release(digest)
            holders[digest] -= 1
    assert arena.held() == sum(3 + int(digest) for digest, count in holders.items() if count)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=4), st.data())
def test_no_chunk_ends_inside_a_span_that_sees_both_ways(layout, data):
    """Chunks of any size reach the end of the prompt, and a span of up to a step's tokens is in one of them."""
    pieces, at = [], 0
    for gap, length in layout:
        pieces.append(Piece(at + gap, length, b"x", sees="piece"))
        at += gap + length
    request = Request(1, [3] * (at + 2), GREEDY, pieces=pieces)
    start, ends = 0, []
    while start < len(request.prompt):
        wanted = min(start + data.draw(st.integers(1, 6)), len(request.prompt))
        end = whole_end(request, start, wanted)
        assert end > start
        ends.append(end)
        start = end
    assert not any(piece.start < end < piece.end for piece in pieces for end in ends)


def run_to_the_end(scheduler: Scheduler) -> None:
    turns = 0
    while scheduler.has_work:
        turns += 1
        assert turns < 400, f"{scheduler.requests} wait for ever"
        step = scheduler.schedule()
        assert all(request.row >= 0 for request in step.admitted)
        for chunk in step.chunks:
            end = chunk.start + chunk.count
            assert not any(piece.start < end < piece.end for piece in chunk.request.pieces)
        scheduler.update(step, [5] * len(step.sampling))
        scheduler.queues.check_integrity()


spans = st.tuples(st.integers(0, 3), st.integers(1, 16), st.integers(1, 12))  # before, long, answer


@given(st.lists(spans, min_size=1, max_size=4), st.integers(6, 24), st.integers(1, 4))
def test_spans_that_see_both_ways_find_room_beside_windows(questions, pages, page_size):
    """In any cache each request ends: refused, answered, or, when it has outgrown the cache, with an error."""
    groups = (CacheGroup("full", 0, (0,)), CacheGroup("window", 4, (1,)))
    limits = Limits(rows=3, step_tokens=32, context=64, pages=pages, page_size=page_size,
                    vocabulary=100, groups=groups, arena_rows=64)  # fmt: skip
    scheduler, requests = Scheduler(limits), []
    for number, (before, length, answer) in enumerate(questions):
        wanted = SamplingParams(max_tokens=answer, ignore_eos=True)
        pieces = [Piece(before, length, b"same", sees="piece")]
        request = Request(
            number, [7] * (before + length + 1), wanted, pieces=pieces, piece_rows=[0]
        )
        try:
            scheduler.add(request)
        except RequestError:
            assert limits.pages_for(request) > pages - 1
            continue
        assert scheduler.queues.arena.hold(b"same", 16) is not None
        requests.append(request)
    run_to_the_end(scheduler)
    for request in requests:
        whole = len(request.outputs) == request.most_outputs
        assert whole if request.finish == "length" else limits.pages_for(request) >= pages - 1


def test_spans_longer_than_a_step_are_refused():
    engine = tiny_engine("qwen3", arena_rows=64)
    long = Piece(0, 40, b"a", sees="prompt")
    tokens = engine.scheduler.limits.step_tokens + 1
    with pytest.raises(RequestError, match=f"{tokens} tokens see each other both ways"):
        engine.add(Request(1, [3] * tokens, GREEDY, pieces=[long], piece_rows=[0]))


def test_a_narrower_reach_has_every_token_that_sees_more_and_all_that_it_sees():
    pieces = (Piece(3, 4, b"a", sees="piece"), Piece(9, 5, b"b", sees="piece"))
    request = Request(1, list(range(20)), SamplingParams(), pieces=pieces, piece_rows=[0, 4])
    other = Chunk(Request(2, [1, 2], SamplingParams()), 0, 2, 0, (), 1)
    whole = reaches_of([other, Chunk(request, 2, 18, 0, (), 1)])[0]
    assert (whole.tokens, whole.length) == (slice(2, 20), 20)
    narrow = whole.narrowed()
    assert (narrow.sequence, narrow.tokens, narrow.length) == (1, slice(3, 14), 14)
    assert narrow.reach_S.tolist() == [7, 7, 7, 7, 8, 9, 14, 14, 14, 14, 14]


def test_frames_far_apart_in_time_are_refused_before_their_numbers_leave_the_context():
    limits = msgspec.structs.replace(
        tiny_engine("qwen3").scheduler.limits, axes=True, arena_rows=64
    )
    frames = Piece(1, 8, b"video", columns=2, step=4, interval=float(limits.context))
    far = Request(
        1, list(range(12)), SamplingParams(max_tokens=2), pieces=(frames,), piece_rows=[0]
    )
    with pytest.raises(RequestError, match="numbers end at"):
        check_request(far, limits)
    near = msgspec.structs.replace(frames, interval=1.0)
    check_request(
        Request(1, list(range(12)), SamplingParams(max_tokens=2), pieces=(near,), piece_rows=[0]),
        limits,
    )
