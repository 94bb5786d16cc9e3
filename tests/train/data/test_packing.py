"""Best-fit packing, against the plain form of the rule and against the best packing there is."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory_tokens import InMemory

from cairn.core.errors import ConfigError, DataError
from cairn.train.data import packing
from cairn.train.data.batch import IGNORED
from cairn.train.data.packed_documents import PackedDocuments
from cairn.train.data.packing import cached_plan, plan_best_fit
from cairn.train.data.store_writer import StoreWriter
from cairn.train.data.tokenizer_trainer import byte_tokenizer


def plain_best_fit(lengths, capacity: int) -> list[list[int]]:
    """The rule as one would say it: longest first, into the fullest bin that still has room."""
    bins: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        fitting = [bin for bin in bins if sum(bin) + length <= capacity]
        if fitting:
            max(fitting, key=sum).append(length)
        else:
            bins.append([length])
    return bins


def fewest_bins(lengths, capacity: int) -> int:
    """The best there is, by trying every bin for every document."""
    best = len(lengths)

    def place(at: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if at == len(lengths):
            best = len(rooms)
            return
        for bin in range(len(rooms)):
            if rooms[bin] >= lengths[at]:
                rooms[bin] -= lengths[at]
                place(at + 1, rooms)
                rooms[bin] += lengths[at]
        place(at + 1, [*rooms, capacity - lengths[at]])

    place(0, [])
    return best


@given(st.lists(st.integers(1, 20), max_size=60), st.integers(20, 40))
def test_the_plan_is_that_of_the_plain_rule(lengths, capacity):
    plan = plan_best_fit(lengths, capacity)
    fills = Counter(sum(piece.length for piece in plan.pieces(bin)) for bin in range(plan.bins))
    assert fills == Counter(map(sum, plain_best_fit(lengths, capacity)))


@given(st.lists(st.integers(1, 10), min_size=1, max_size=8))
def test_the_plan_is_near_the_best_there_is(lengths):
    bins, best = plan_best_fit(lengths, 10).bins, fewest_bins(lengths, 10)
    assert best <= bins <= 11 / 9 * best + 6 / 9  # the bound of best-fit decreasing


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 30))
def test_no_token_is_lost_or_doubled_when_documents_are_cut(lengths, capacity):
    plan = plan_best_fit(lengths, capacity, too_long="cut")
    seen = Counter()
    for bin in range(plan.bins):
        pieces = plan.pieces(bin)
        assert 0 < sum(piece.length for piece in pieces) <= capacity
        for piece in pieces:
            seen.update((piece.document, piece.start + at) for at in range(piece.length))
    assert seen == Counter((doc, at) for doc, length in enumerate(lengths) for at in range(length))


def test_a_document_longer_than_the_context_is_refused_with_its_number():
    with pytest.raises(
        DataError,
        match=r"2 of 4 documents are longer than a sequence of 8 .* "
        r"document 3, has 12",
    ) as refused:
        plan_best_fit([8, 9, 1, 12], 8)
    assert "data.sequence to 12" in (refused.value.hint or "")


def test_a_large_plan_is_dense():
    lengths = np.random.default_rng(0).integers(1, 1500, 20_000)
    plan = plan_best_fit(lengths, 4096)
    assert plan.filled > 0.999
    assert plan.length.sum() == lengths.sum()


def test_the_plan_is_made_once_and_made_again_when_it_is_damaged(tmp_path, monkeypatch):
    lengths = np.array([3, 4, 5, 6])
    first = cached_plan(lengths, 8, "refuse", tmp_path)
    (kept,) = tmp_path.iterdir()
    made = []
    monkeypatch.setattr(packing, "plan_best_fit", lambda *a: made.append(a) or plan_best_fit(*a))
    again = cached_plan(lengths, 8, "refuse", tmp_path)
    assert not made
    assert [again.pieces(bin) for bin in range(again.bins)] == [
        first.pieces(bin) for bin in range(first.bins)
    ]
    cached_plan(np.array([3, 4, 5, 7]), 8, "refuse", tmp_path)  # other lengths, another plan
    assert len(made) == 1
    content = kept.read_bytes()
    for damaged in (content[:-30], content[: len(content) // 2], b"", b"PK" + content[2:][::-1]):
        kept.write_bytes(damaged)
        assert cached_plan(lengths, 8, "refuse", tmp_path).bins == first.bins
    assert len(made) == 5


@given(st.lists(st.integers(1, 12), min_size=1, max_size=12), st.sampled_from(["refuse", "cut"]))
def test_samples_are_whole_documents_with_their_own_targets(lengths, too_long):
    ids = iter(range(1, 1_000_000))
    documents = [[next(ids) for _ in range(length)] for length in lengths]
    masks = [[(id % 3 > 0) for id in document] for document in documents]
    context = 12 if too_long == "refuse" else 5
    source = PackedDocuments(InMemory(documents, masks), context, pad_id=0, too_long=too_long)
    follows = {one: other for doc in documents for one, other in pairwise(doc)}
    seen = []
    for number in range(source.samples_per_epoch):
        batch = source.batch(number)
        assert len(batch.tokens_T) == context == sum(batch.lengths)
        for id, target in zip(batch.tokens_T.tolist(), batch.targets_T.tolist(), strict=True):
            learnt = id in follows and follows[id] % 3 > 0
            assert target == (follows[id] if learnt else IGNORED)
        real = [id for id in batch.tokens_T.tolist() if id]
        seen += real
    assert sorted(seen) == sorted(id for document in documents for id in document)


def test_the_plan_of_a_store_lies_in_the_store(tmp_path):
    tokenizer = byte_tokenizer()
    with StoreWriter(tmp_path / "s", tokenizer, learn=True) as writer:
        for text in ("one", "three", "seven"):
            writer.add(tokenizer.encode(text), np.ones(len(text), bool))
    from cairn.train.data.store import Store

    source = PackedDocuments(Store(tmp_path / "s"), 8, pad_id=3)
    assert list((tmp_path / "s").glob("plan-8-refuse-*.npz"))
    assert source.samples_per_epoch == 2
    Store(tmp_path / "s").verify()


def test_samples_are_trained_on_or_kept_apart():
    documents = [[number] * 6 for number in range(1, 41)]
    masks = [[True] * 6 for _ in documents]
    parts = [
        PackedDocuments(InMemory(documents, masks), 8, span=span)
        for span in ((0.0, 0.9), (0.9, 1.0), (0.0, 1.0))
    ]
    seen = [
        {t for n in range(p.samples_per_epoch) for t in p.batch(n).tokens_T.tolist()} - {0}
        for p in parts
    ]
    assert len(seen[0]) == 36
    assert not seen[0] & seen[1]
    assert seen[0] | seen[1] == seen[2]
    # A run without validation has the fingerprint it always had.
    assert len({p.fingerprint for p in parts}) == 3
    assert parts[2].fingerprint.count("40 bins") == 1
    assert "of 40 bins" not in parts[2].fingerprint
    assert PackedDocuments(InMemory(documents, masks), 8, span=(0.999, 1.0)).samples_per_epoch == 1
    with pytest.raises(ConfigError, match="leave none"):
        PackedDocuments(InMemory(documents[:1], masks[:1]), 8, span=(0.9, 1.0))
