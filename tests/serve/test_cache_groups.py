"""Cache groups: the same tokens with fewer pages, and a prefix is found where every group can go on from it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_engines import at_rest, prompt_of, submit, tiny_engine

from cairn.models.attend import AttentionRule
from cairn.models.cache import CacheGroup, Plane, cache_groups, page_bytes
from cairn.models.presets import preset
from cairn.serve.engine.anchors import anchors_of
from cairn.serve.engine.block_manager import BlockManager
from cairn.serve.engine.pages import Paged, PagePool
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.sampling_params import SamplingParams
from cairn.serve.simulate import simulate

FULL, NARROW, WIDE = CacheGroup(), CacheGroup("window", 3), CacheGroup("window", 9)
STATE = CacheGroup("state")


def make(prompt, **fields) -> Request:
    return Request("r", list(prompt), SamplingParams(), **fields)


def fill(blocks: BlockManager, prompt, chunk: int = 100, **fields) -> Request:
    """As the scheduler computes a prompt: whole, in chunks."""
    request = make(prompt, **fields)
    assert blocks.allocate(request, len(prompt)) is not None
    while request.computed < len(prompt):
        end = min(request.computed + chunk, len(prompt))
        if blocks.stateful:
            end = blocks.cut(request, request.computed, end)
        if blocks.windowed:
            assert blocks.prepare(request, end)[0] == end
        request.computed = end
        blocks.publish(request, end)
        if blocks.stateful:
            blocks.save_state(request, end)
            blocks.take_copies()
    return request


# -- the same tokens, with fewer pages ---------------------------------------------------------------


@pytest.mark.parametrize(
    "switches", [{}, {"chunked": True, "overlap": True}, {"tight": True}], ids=str
)
def test_tokens_are_the_same_with_groups_and_without(switches):
    shared, answers, used = prompt_of(60, seed=1), [], []
    for groups in (True, False):
        engine = tiny_engine("gemma3", groups=groups, **switches)
        requests = submit(
            engine, [shared, [*shared, *prompt_of(25, seed=2)], prompt_of(30, seed=3)]
        )
        engine.run()
        later = submit(engine, [[*shared, *requests[0].outputs, 7]], max_tokens=4)
        engine.run()
        assert later[0].cached or "tight" in switches
        answers.append([request.outputs for request in (*requests, *later)])
        used.append(len(engine.scheduler.blocks.groups))
        at_rest(engine)
    assert answers[0] == answers[1]
    assert used[0] > used[1] == 1


@pytest.mark.parametrize(
    ("name", "most"), [("gemma-3-270m", 0.25), ("gemma-3-1b", 0.25), ("gemma-3-4b", 0.265)]
)
def test_bytes_held_at_8k_are_a_quarter(name, most):
    """Of a request that is served to its end.

    4b keeps all keys in 5 of its 34 layers and 1024 tokens in the others: no cache can hold less than 25.4% of 8192.
    A window that begins inside a page reaches into 17 pages of 64 tokens, which makes it 26.0%, and six tables of five
    layers have room for one layer more than there are, which makes it 26.4%.
    """
    held = []
    for grouped in (True, False):
        groups = cache_groups(preset(name), grouped=grouped)
        limits = Limits(
            rows=1,
            step_tokens=512,
            context=8192,
            pages=4000,
            page_size=64,
            vocabulary=9,
            groups=groups,
        )
        params = SamplingParams(max_tokens=6000, ignore_eos=True)
        request = Request(0, [1] * 2192, params)
        result = simulate([(0.0, request)], limits, lambda step: 1e-3)
        assert result.outcomes[0].finish == "length"
        held.append(result.peak_pages * page_bytes(groups, 64, 2))
    assert held[0] <= most * held[1]


def test_what_lies_behind_a_window_is_not_read():
    """Pages that a window has left may hold anything by now."""
    planes = (Plane("k", 2, 4), Plane("v", 2, 4))
    group = CacheGroup("window", 20, (0,), planes)
    outputs = []
    for poison in (0.0, torch.nan):
        torch.manual_seed(0)
        pool = PagePool((group,), 12, 16, torch.float32, "cpu")
        pool.cache.normal_()
        tables = torch.tensor([[[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]], dtype=torch.int32)
        lengths = torch.tensor([75, 70], dtype=torch.int32)
        starts = [74, 50]  # of the second sequence, 20 tokens are computed now
        for table, start in zip(tables[0].tolist(), starts, strict=True):
            first = group.first_page(start, 16)
            for page in table[:first]:
                pool.cache[:, :, page] = poison
        positions = torch.tensor([74, *range(50, 70)], dtype=torch.int32)
        row = torch.tensor([0] + [1] * 20)
        slots = tables[0][row, positions // 16] * 16 + positions % 16
        attend = Paged(
            pool, slots[None].int(), positions, lengths, tables, torch.tensor([0, 1, 21])
        )
        q, k, v = torch.randn(21, 4, 4), torch.randn(21, 2, 4), torch.randn(21, 2, 4)
        for softcap in (0.0, 5.0):
            outputs.append(
                attend(q, k, v, AttentionRule(layer=0, scale=0.5, window=20, softcap=softcap))
            )
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert outputs[0].isfinite().all()


# -- what is found --------------------------------------------------------------------------------------


def test_a_window_needs_its_last_pages_only():
    blocks = BlockManager(40, 4, groups=(FULL, WIDE))
    blocks.free(fill(blocks, range(40)))
    found = blocks.prefix.find(make([*range(32), 99, 98]))
    assert found.pages == 8
    assert all(found.tables[0])
    assert found.tables[1][:6] == [0] * 6  # the next token sees 24 .. 32
    assert all(found.tables[1][6:])
    blocks.check_integrity()


def test_a_hit_is_what_all_groups_accept():
    """The full group has nine pages, the window lacks one of them: a hit ends before it, or a window behind it."""
    blocks = BlockManager(60, 4, groups=(FULL, NARROW, STATE), states=9)
    talk = fill(blocks, [*range(1, 20), 0, *range(20, 40)], chunk=8, eos_ids=(0,))
    blocks.free(talk)
    same = make([*range(1, 20), 0, *range(20, 40), 77, 78], eos_ids=(0,))
    assert blocks.prefix.find(same).pages == 9  # the snapshot before the page with the last token
    blocks.forget([blocks.prefix.find(same).tables[1][8]])
    found = blocks.prefix.find(same)
    assert found.pages == 5  # the snapshot behind the first turn
    assert len(found.states) == 1


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=30), min_size=1, max_size=6),
    st.sampled_from([(FULL, NARROW), (WIDE,), (FULL, NARROW, WIDE), (FULL, STATE), (WIDE, STATE)]),
    st.integers(1, 4),
    st.integers(1, 9),
    st.data(),
)
def test_what_is_found_is_what_brute_force_finds(prompts, groups, size, chunk, data):
    """Every length is tried against the pages that each group has; some were lost."""
    blocks = BlockManager(400, size, groups=groups, states=50)
    for prompt in prompts:
        request = make(prompt, eos_ids=(1,))
        found = blocks.prefix.find(request)
        known = blocks.prefix._pages_of

        def accepts(length, request=request, known=known):
            for group, pages in zip(groups, known, strict=True):
                needed = (
                    [length - 1]
                    if group.kind == "state"
                    else range(group.first_page(length * size, size), length)
                )
                if length and any(request.hashes[at] not in pages for at in needed):
                    return False
            return True

        most = (len(prompt) - 1) // size
        assert found.pages == max(length for length in range(most + 1) if accepts(length))
        done = fill(blocks, prompt, chunk, eos_ids=(1,))
        blocks.check_integrity()
        blocks.free(done)
        lost = data.draw(st.lists(st.integers(1, 40), max_size=3))
        blocks.forget(sorted(set(lost)))
        blocks.check_integrity()


def test_pages_of_other_weights_are_not_found():
    blocks = BlockManager(40, 4)
    old = fill(blocks, range(12), identity=b"version 1")
    assert blocks.prefix.find(make(range(12), identity=b"version 1")).pages == 2
    for other in (
        make(range(12)),
        make(range(12), identity=b"version 2"),
        make(range(12), salt="version 1"),
    ):
        assert blocks.prefix.find(other).pages == 0
    assert old.hashes[0] != fill(blocks, range(12), salt="v", identity=b"ersion 1").hashes[0]


# -- what is kept longest ----------------------------------------------------------------------------------


def test_anchors_are_the_first_turn_the_last_and_the_end_of_the_prompt():
    prompt = [5, 5, 5, 0, 6, 6, 6, 0, 7, 7, 7, 7, 0, 8, 8, 8, 8, 8]
    assert anchors_of(prompt, {0}, 2) == [2, 6, 9]
    assert anchors_of(prompt, (), 4) == [4]
    assert anchors_of([1, 2], (), 4) == []


def test_pages_behind_a_window_go_first_unless_they_are_before_an_anchor():
    blocks = BlockManager(60, 2, groups=(FULL, NARROW))
    prompt = [*range(1, 8), 0, *range(8, 31)]  # a turn of 8 tokens, and a question of 23
    blocks.free(fill(blocks, [9] * 10))  # somebody's pages, freed before
    request = fill(blocks, prompt, chunk=4, eos_ids=(0,))
    order = list(blocks.pool.free)
    entries = {page: blocks.prefix.entry(page) for page in order}
    left = [page for page in order if entries[page] and entries[page].group == 1]
    turn, others = request.hashes[2:4], request.hashes[4:]
    kept = [page for page in left if entries[page].digest in turn]
    recycled = [page for page in left if entries[page].digest in others]
    assert kept
    assert recycled
    somebody = [page for page in order if entries[page] and entries[page].group == 0]
    assert max(map(order.index, recycled)) < min(map(order.index, somebody))
    assert min(map(order.index, kept)) > max(map(order.index, somebody))
    # When the request ends, its anchors are as recent as the rest of it.
    blocks.free(request)
    order = list(blocks.pool.free)
    assert order[-len(kept) :] == kept
    blocks.check_integrity()


def test_tables_that_come_from_elsewhere_hold_what_the_next_token_sees():
    blocks = BlockManager(40, 4, groups=(FULL, WIDE))
    request = make(range(40))
    assert blocks.adopt(request, 40)
    assert len(blocks.seen(request, 40)) == blocks.usage().used == 10 + 2
    assert blocks.usage().groups == (10, 2)
    blocks.check_integrity()
    assert not blocks.adopt(make(range(160)), 160)
    blocks.free(request)
    assert blocks.usage().used == 0
