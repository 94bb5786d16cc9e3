"""Windows over a token stream, against a walk through the documents token by token."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from in_memory_tokens import InMemory

from cairn.core.errors import ConfigError, DataError
from cairn.train.data.batch import IGNORED, join
from cairn.train.data.blend import Blend
from cairn.train.data.source import microbatch
from cairn.train.data.windows import Windows

LENGTHS = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any)


def numbered(lengths) -> InMemory:
    """Documents whose tokens are all different: 0, 1, 2, ..."""
    ids = iter(range(1_000_000))
    return InMemory([[next(ids) for _ in range(length)] for length in lengths])


@given(LENGTHS, st.integers(1, 15), st.booleans())
def test_an_epoch_holds_every_token_and_each_predicts_the_next_of_its_document(
    lengths, length, shuffle
):
    tokens = numbered(lengths)
    total = sum(lengths)
    if total < length:
        with pytest.raises(DataError, match=f"has {total} tokens, less than one sequence"):
            Windows(tokens, length)
        return
    source = Windows(tokens, length, seed=3, shuffle=shuffle)
    last_of_document = {document[-1] for document in tokens.documents if document}
    first_of_document = {document[0] for document in tokens.documents if document}
    seen: Counter[int] = Counter()
    for number in range(source.samples_per_epoch):
        batch = source.batch(number)
        ids, targets = batch.tokens_T.tolist(), batch.targets_T.tolist()
        assert len(ids) == length == sum(batch.lengths)
        seen.update(ids)
        for at, (id, target, position) in enumerate(
            zip(ids, targets, batch.positions_T.tolist(), strict=True)
        ):
            assert target == (IGNORED if id in last_of_document else id + 1)
            restarts = at == 0 or id in first_of_document or id < ids[at - 1]
            assert position == (0 if restarts else batch.positions_T[at - 1] + 1)
        assert batch.cu_seqlens.tolist() == [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
    assert set(seen) == set(range(total))  # nothing is lost
    assert sum(seen.values()) - total < length  # and little is seen twice


@given(LENGTHS, st.integers(1, 15))
def test_without_boundaries_a_window_is_one_document(lengths, length):
    tokens = numbered(lengths)
    if sum(lengths) < length:
        return
    source = Windows(tokens, length, boundaries=False, shuffle=False)
    batch = source.batch(0)
    assert batch.lengths == [length]
    nexts = [id + 1 if id + 1 < sum(lengths) else IGNORED for id in batch.tokens_T.tolist()]
    assert batch.targets_T.tolist() == nexts


def test_only_what_the_mask_says_is_learnt():
    tokens = InMemory([[1, 2, 3, 4], [5, 6]], [[0, 0, 1, 1], [1, 1]])
    batch = Windows(tokens, 6, shuffle=False).batch(0)
    assert batch.targets_T.tolist() == [IGNORED, 3, 4, IGNORED, 6, IGNORED]
    assert batch.valid() == 3


def test_each_epoch_has_an_order_of_its_own_and_repeats_exactly():
    source = Windows(numbered([100]), 10, seed=1)
    firsts = [source.batch(number).tokens_T[0].item() for number in range(30)]
    assert sorted(firsts[:10]) == sorted(firsts[10:20]) == list(range(0, 100, 10))
    assert firsts[:10] != firsts[10:20]
    again = Windows(numbered([100]), 10, seed=1)
    assert [again.batch(number).tokens_T[0].item() for number in reversed(range(30))] == firsts[
        ::-1
    ]


def test_training_and_validation_share_no_window():
    parts = [Windows(numbered([1000]), 10, span=span) for span in ((0, 0.9), (0.9, 1))]
    seen = [
        {t for n in range(p.samples_per_epoch) for t in p.batch(n).tokens_T.tolist()} for p in parts
    ]
    assert len(seen[0]) == 900
    assert not seen[0] & seen[1]
    assert parts[0].fingerprint != parts[1].fingerprint
    # The last window of 1,005 tokens goes round to tokens that are trained on: it is in neither part.
    last = Windows(numbered([1005]), 10, span=(0.9, 1))
    assert {
        t for n in range(last.samples_per_epoch) for t in last.batch(n).tokens_T.tolist()
    } == set(range(910, 1000))


@given(st.integers(2, 60), st.integers(0, 9), st.floats(0.001, 0.999))
def test_a_small_text_has_a_held_out_part_too(whole, rest, share):
    """Any text of two whole windows: both parts have one, none of a window is in both, and none goes round."""
    parts = [
        Windows(numbered([10 * whole + rest]), 10, span=span)
        for span in ((0.0, 1 - share), (1 - share, 1.0))
    ]
    seen = [
        [t for n in range(p.samples_per_epoch) for t in p.batch(n).tokens_T.tolist()] for p in parts
    ]
    assert sorted(seen[0] + seen[1]) == list(range(10 * whole))
    assert seen[0]
    assert seen[1]


def test_a_text_of_one_window_says_how_to_go_on():
    with pytest.raises(ConfigError) as error:
        Windows(numbered([19]), 10, span=(0.95, 1.0))
    assert "19 tokens" in str(error.value)
    assert "--data.sequence 9 or less" in str(error.value.hint)


def test_a_microbatch_is_samples_side_by_side():
    source = Windows(numbered([7, 9, 30]), 8)
    both = microbatch(source, range(4, 6))
    one, other = source.batch(4), source.batch(5)
    assert both.ids == [4, 5]
    assert both.tokens_T.tolist() == one.tokens_T.tolist() + other.tokens_T.tolist()
    assert both.positions_T.tolist() == one.positions_T.tolist() + other.positions_T.tolist()
    assert both.lengths == one.lengths + other.lengths
    assert both.cu_seqlens.dtype == torch.int32
    assert both.cu_seqlens[-1] == 16
    assert join([one]).tokens_T.equal(one.tokens_T)


def test_a_blend_reads_each_source_in_its_own_order():
    sources = [Windows(numbered([100]), 10, seed=seed) for seed in (1, 2)]
    blend = Blend(sources, [3, 1])
    own = [0, 0]
    for number in range(40):
        which, place = blend.pattern.locate(number)
        assert place == own[which]
        own[which] += 1
        batch = blend.batch(number)
        assert batch.tokens_T.equal(sources[which].batch(place).tokens_T)
        assert batch.ids == [number]
    assert own == [30, 10]
    assert blend.samples_per_epoch == 40
    with pytest.raises(ConfigError, match="2 sources in the blend, but 1 weights"):
        Blend(sources, [1])
    with pytest.raises(ConfigError, match=r"samples of \[5, 10\] tokens"):
        Blend([sources[0], Windows(numbered([100]), 5)], [1, 1])
