"""The token store: what goes in comes out, and nothing damaged is read."""

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import ConfigError, DataError
from cairn.train.data.store import INDEX, TOKENS, Store, is_store
from cairn.train.data.store_writer import StoreWriter
from cairn.train.data.tokenizer_identity import check_same, tokenizer_hash
from cairn.train.data.tokenizer_trainer import byte_tokenizer, train_tokenizer
from cairn.train.data.tokens import Joined, count, document, documents

BYTES = byte_tokenizer()


def write(path: Path, texts, **options) -> Store:
    with StoreWriter(path, BYTES, **options) as writer:
        for text in texts:
            writer.add(BYTES.encode(text))
    return Store(path)


@given(st.lists(st.lists(st.integers(0, 259), max_size=20), min_size=1, max_size=20))
def test_documents_come_back_as_they_went_in(tmp_path_factory, written):
    if not any(written):
        written[0] = [7]
    path = tmp_path_factory.mktemp("store") / "s"
    with StoreWriter(path, BYTES) as writer:
        for ids in written:
            writer.add(ids)
    store = Store(path)
    assert [document(store, number).tolist() for number in range(documents(store))] == written
    assert count(store) == sum(map(len, written))
    store.verify()


def test_a_store_carries_its_tokenizer_and_its_mask(tmp_path):
    with StoreWriter(tmp_path / "s", BYTES, learn=True) as writer:
        writer.add([5, 6, 7], np.array([False, True, True]))
    store = Store(tmp_path / "s")
    assert store.mask(0, 3).tolist() == [False, True, True]
    assert tokenizer_hash(store.own_tokenizer()) == store.tokenizer == tokenizer_hash(BYTES)
    assert pickle.loads(pickle.dumps(store)).read(0, 3).tolist() == [5, 6, 7]


def test_ids_beyond_65535_take_four_bytes(tmp_path):
    large = byte_tokenizer()
    large.backend.add_tokens([f"word{number}" for number in range(65536 - 260)])
    with StoreWriter(tmp_path / "small", large) as writer:
        writer.add([65535])
    large.backend.add_tokens(["one more"])
    with StoreWriter(tmp_path / "large", large) as writer:
        writer.add([65536])
    assert Store(tmp_path / "small").header.dtype == "uint16"
    assert Store(tmp_path / "large").header.dtype == "uint32"
    assert Store(tmp_path / "large").read(0, 1).tolist() == [65536]


@pytest.mark.parametrize("name", [TOKENS, INDEX])
def test_a_truncated_file_is_refused(tmp_path, name):
    write(tmp_path / "s", ["hello", "world"])
    content = (tmp_path / "s" / name).read_bytes()
    for length in range(0, len(content), 3):
        (tmp_path / "s" / name).write_bytes(content[:length])
        with pytest.raises(DataError, match=r"damaged|truncated"):
            Store(tmp_path / "s")


def test_every_changed_bit_of_the_index_offsets_is_seen(tmp_path):
    write(tmp_path / "s", ["hello", "world"])
    path = tmp_path / "s" / INDEX
    content = bytearray(path.read_bytes())
    start = len(content) - 3 * 8
    for at in (*range(8), *range(start, len(content))):
        for bit in (0, 7):
            content[at] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(DataError, match="damaged"):
                Store(tmp_path / "s")
            content[at] ^= 1 << bit


def test_a_changed_token_is_seen_when_it_is_looked_for(tmp_path):
    store = write(tmp_path / "s", ["hello", "world"])
    path = tmp_path / "s" / TOKENS
    content = bytearray(path.read_bytes())
    content[4] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokens\.bin is damaged: its checksum"):
        store.verify()


def test_a_store_of_another_version_or_kind_is_refused(tmp_path):
    write(tmp_path / "s", ["hello"])
    path = tmp_path / "s" / INDEX
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"version":1', b'"version":9'))
    with pytest.raises(DataError, match="version 9; this Cairn reads version 1"):
        Store(tmp_path / "s")
    path.write_bytes(content.replace(b'"documents"', b'"dokuments"'))
    with pytest.raises(DataError, match="header cannot be read"):
        Store(tmp_path / "s")
    with pytest.raises(DataError, match="not a token store"):
        Store(tmp_path / "nowhere")
    with pytest.raises(DataError, match="not within"):
        write(tmp_path / "t", ["hello"]).read(3, 9)


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    store = write(tmp_path / "s", ["hello"])
    other = train_tokenizer(["some words and more words"] * 3, 265)
    with pytest.raises(DataError, match="made with another tokenizer"):
        check_same(store.tokenizer, other, "s")
    check_same(store.tokenizer, byte_tokenizer(), "s")


def test_a_name_that_is_taken_is_refused_unless_replaced(tmp_path):
    write(tmp_path / "s", ["old"])
    with pytest.raises(ConfigError, match="exists"):
        StoreWriter(tmp_path / "s", BYTES)
    assert BYTES.decode(document(write(tmp_path / "s", ["new"], replace=True), 0)) == "new"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not a token store"):
        StoreWriter(tmp_path / "mine", BYTES, replace=True)
    assert sorted(os.listdir(tmp_path)) == ["mine", "s"]


def test_an_error_on_the_way_leaves_nothing_behind(tmp_path):
    write(tmp_path / "s", ["old"])
    with pytest.raises(TypeError), StoreWriter(tmp_path / "s", BYTES, replace=True) as writer:
        writer.add_many(np.array([1, 2, 3]), [3, None])
    assert os.listdir(tmp_path) == ["s"]
    assert BYTES.decode(document(Store(tmp_path / "s"), 0)) == "old"
    with pytest.raises(DataError, match="not below 260"), StoreWriter(tmp_path / "t", BYTES) as bad:
        bad.add([260])
    with pytest.raises(DataError, match="nothing to write"), StoreWriter(tmp_path / "t", BYTES):
        pass
    assert os.listdir(tmp_path) == ["s"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_with_numbers_and_leaves_nothing(tmp_path):
    def fill() -> None:
        with StoreWriter(tmp_path / "s", BYTES) as writer, open("/dev/full", "wb", 0) as full:
            writer.add([1] * 100_000)
            writer._files[TOKENS].close()
            writer._files[TOKENS] = full
            writer.add([1] * 100_000)

    with pytest.raises(DataError, match=r"the disk is full: .* beyond 100000 tokens"):
        fill()
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_killed_leaves_no_store(tmp_path):
    program = f"""
        import os, signal
        from pathlib import Path
        from cairn.train.data.store_writer import StoreWriter
        from cairn.train.data.tokenizer_trainer import byte_tokenizer
        with StoreWriter(Path({str(tmp_path / "s")!r}), byte_tokenizer()) as writer:
            writer.add([1] * 1_000_000)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not is_store(tmp_path / "s")
    assert write(tmp_path / "s", ["second try"])  # what is left over is in nobody's way


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(tmp_path):
    """In a container every process has the same number."""
    (tmp_path / f"s.unfinished-{os.getpid()}" / "tokenizer").mkdir(parents=True)
    assert write(tmp_path / "s", ["second try"])


def test_parts_are_read_as_one(tmp_path):
    parts = [
        write(tmp_path / name, texts) for name, texts in (("a", ["one", "two!"]), ("b", ["3"]))
    ]
    both = Joined(parts, tmp_path)
    assert both.offsets.tolist() == [0, 3, 7, 8]
    for start in range(9):
        for stop in range(start, 9):
            assert BYTES.decode(both.read(start, stop)) == "onetwo!3"[start:stop]
            assert len(both.mask(start, stop)) == stop - start
    with pytest.raises(DataError, match="no document 3; it has 3"):
        document(both, 3)


def test_the_header_is_what_the_format_says(tmp_path):
    """Read by hand, as a reader in another language would."""
    write(tmp_path / "s", ["ab", "c"])
    content = (tmp_path / "s" / INDEX).read_bytes()
    assert content[:8] == b"CAIRNIDX"
    length = int.from_bytes(content[8:16], "little")
    assert length % 8 == 0
    header = msgspec.json.decode(content[16 : 16 + length])
    assert (header["documents"], header["tokens"], header["dtype"]) == (2, 3, "uint16")
    assert np.frombuffer(content[16 + length :], "<u8").tolist() == [0, 2, 3]
    assert np.fromfile(tmp_path / "s" / TOKENS, "<u2").tolist() == BYTES.encode("abc")
