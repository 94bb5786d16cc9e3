"""Streaming from parquet, against a plain walk over its row groups; and every kind of source by its name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cairn.core.errors import ConfigError, DataError
from cairn.train.data.batch import IGNORED
from cairn.train.data.counter_rng import mix
from cairn.train.data.open_source import open_blend, open_source, own_tokenizer
from cairn.train.data.packed_documents import PackedDocuments
from cairn.train.data.shuffle import permute
from cairn.train.data.store_writer import StoreWriter
from cairn.train.data.stories import story
from cairn.train.data.text_files import find_files
from cairn.train.data.tokenizer_trainer import byte_tokenizer, train_tokenizer
from cairn.train.data.windows import Windows

BYTES = byte_tokenizer()
TEXTS = [story(0, number)[: 5 + 37 * number % 90] for number in range(40)]


def write_parquet(path: Path, texts, rows: int = 4) -> Path:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=rows)
    return path


def expected_stream(texts, rows: int, seed: int, epoch: int) -> list[int]:
    """The tokens of an epoch in its order; document ends are the end-of-text tokens."""
    groups = [texts[at : at + rows] for at in range(0, len(texts), rows)]
    order = [permute(place, len(groups), mix(seed, epoch)) for place in range(len(groups))]
    return [
        id for group in order for text in groups[group] if text for id in [*BYTES.encode(text), 0]
    ]


@pytest.fixture
def stream(tmp_path):
    from cairn.train.data.parquet_stream import ParquetStream

    def make(texts, length: int, rows: int = 4, **options):
        files = find_files([write_parquet(tmp_path / "a.parquet", texts, rows)])
        return ParquetStream(files, BYTES, length, seed=5, **options)

    return make


@pytest.mark.parametrize("length", [23, 64, 1000])
def test_samples_are_windows_over_the_shuffled_row_groups(stream, length):
    texts = [*TEXTS, None, ""]
    source = stream(texts, length)
    first = expected_stream(texts, 4, 5, 0)
    assert source.samples_per_epoch is None  # not known before it is read
    samples = -(-len(first) // length)
    for number in range(2 * samples):  # two epochs
        ids = expected_stream(texts, 4, 5, number // samples)
        round_and_round = np.array(ids * (2 + length // len(ids)))
        start = number % samples * length
        window = round_and_round[start : start + length + 1]
        batch = source.batch(number)
        assert batch.tokens_T.tolist() == window[:-1].tolist()
        targets = np.where(window[:-1] == 0, IGNORED, window[1:])
        assert batch.targets_T.tolist() == targets.tolist()
        ends = [at + 1 for at in range(length) if window[at] == 0]
        assert batch.cu_seqlens.tolist() == sorted({0, *ends, length})
    assert source.samples_per_epoch == samples


def test_any_sample_can_be_asked_for_first(stream):
    one = [stream(TEXTS, 50).batch(number).tokens_T.tolist() for number in (30, 3, 31, 100)]
    source = stream(TEXTS, 50)
    both = {number: source.batch(number).tokens_T.tolist() for number in (3, 30, 31, 100)}
    assert one == [both[number] for number in (30, 3, 31, 100)]


def test_a_resume_does_not_tokenize_what_lies_behind_it(stream, tmp_path):
    counts = tmp_path / "counts.json"
    before = stream(TEXTS, 50, counts=counts)
    expected = [before.batch(number).tokens_T.tolist() for number in range(25)]
    after = stream(TEXTS, 50, counts=counts)
    read = []
    plain = after._tokenize
    after._tokenize = lambda group: read.append(group.number) or plain(group)
    assert after.batch(20).tokens_T.tolist() == expected[20]
    assert len(read) <= 2
    counts.write_text("{ damaged")
    assert stream(TEXTS, 50, counts=counts).batch(20).tokens_T.tolist() == expected[20]
    assert json.loads(counts.read_text())["counts"]


def test_files_that_were_written_again_are_counted_again(stream, tmp_path):
    """Under the old counts samples would begin somewhere within others, and a resume would not notice."""
    counts = tmp_path / "counts.json"
    old = stream(TEXTS, 50, counts=counts)
    for number in range(25):
        old.batch(number)
    new = stream([text * 2 for text in TEXTS], 50, counts=counts)
    fresh = stream([text * 2 for text in TEXTS], 50)
    assert new.fingerprint != old.fingerprint
    for number in (0, 7, 20):
        assert torch.equal(new.batch(number).tokens_T, fresh.batch(number).tokens_T)


def test_other_files_beside_parquet_are_no_data(tmp_path):
    """A dataset of the hub has a README.md."""
    write_parquet(tmp_path / "a.parquet", TEXTS)
    (tmp_path / "README.md").write_text("# About\n")
    (tmp_path / "info.json").write_text("{}\n")
    alone = open_source(str(tmp_path / "a.parquet"), BYTES, 50)
    assert open_source(str(tmp_path), BYTES, 50).fingerprint == alone.fingerprint


def test_parquet_that_cannot_be_read_is_refused_at_once(stream, tmp_path):
    with pytest.raises(DataError, match="no column 'body'; it has: text"):
        stream(TEXTS, 50, column="body")
    with pytest.raises(DataError, match="no text in column"):
        stream(["", None], 50).batch(0)
    write_parquet(tmp_path / "n.parquet", [1, 2, 3])
    with pytest.raises(DataError, match="holds int64, not text"):
        open_source(str(tmp_path / "n.parquet"), BYTES, 8)


def test_every_source_is_opened_by_its_name(tmp_path):
    with StoreWriter(tmp_path / "texts", BYTES) as writer:
        writer.add([7] * 100)
    with StoreWriter(tmp_path / "chats", BYTES, learn=True) as writer:
        writer.add([7] * 10, np.ones(10, bool))
    write_parquet(tmp_path / "a.parquet", TEXTS)
    assert isinstance(open_source(str(tmp_path / "texts"), BYTES, 10), Windows)
    chats = open_source(str(tmp_path / "chats"), BYTES, 16)
    assert isinstance(chats, PackedDocuments)
    assert chats.batch(0).tokens_T.tolist() == [7] * 10 + [BYTES.pad_id] * 6
    names = [
        "stories",
        str(tmp_path / "texts"),
        str(tmp_path / "a.parquet"),
        str(tmp_path / "chats"),
    ]
    blend = open_blend(names, [1, 2, 1, 1], BYTES, 16)
    kinds = {blend.batch(number).tokens_T[0].item() for number in range(20)}
    assert len(kinds) > 3
    assert own_tokenizer(names[1]) is not None
    assert own_tokenizer("stories") is None
    assert open_blend(["arithmetic"], [], BYTES, 16).samples_per_epoch is None


def test_a_source_that_is_wrong_is_refused_before_training(tmp_path):
    with StoreWriter(tmp_path / "s", BYTES) as writer:
        writer.add([7] * 100)
    other = train_tokenizer(["some words and more words"] * 3, 265)
    with pytest.raises(DataError, match="made with another tokenizer"):
        open_source(str(tmp_path / "s"), other, 10)
    with pytest.raises(DataError, match="has 100 tokens, less than one sequence of 512"):
        open_source(str(tmp_path / "s"), BYTES, 512)
    with pytest.raises(ConfigError, match="no data at 'storys'") as refused:
        open_source("storys", BYTES, 10)
    assert "stories" in (refused.value.hint or "")
    with pytest.raises(ConfigError, match="no data to train on"):
        open_blend([], [], BYTES, 10)
    (tmp_path / "a.bin").write_text("x")
    with pytest.raises(DataError, match="in no format"):
        open_source(str(tmp_path / "a.bin"), BYTES, 10)


def test_row_groups_are_trained_on_or_kept_apart(tmp_path):
    texts = [f"document {n} " * 9 for n in range(20)]
    write_parquet(tmp_path / "t.parquet", texts, 2)
    write_parquet(tmp_path / "one.parquet", texts, 20)

    def seen(span):
        source = open_source(str(tmp_path / "t.parquet"), BYTES, 64, span=span)
        text = "".join(BYTES.decode(source.batch(n).tokens_T.tolist()) for n in range(100))
        return {word for word in text.split() if word.isdigit() and len(word) == 2}

    assert seen((0.0, 0.9)) == {str(n) for n in range(10, 18)}
    assert seen((0.9, 1.0)) == {"18", "19"}
    with pytest.raises(ConfigError, match="one row group"):
        open_source(str(tmp_path / "one.parquet"), BYTES, 64, span=(0.9, 1.0))
