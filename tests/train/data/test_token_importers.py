"""Megatron's and llm.c's files, written here by hand after their formats, and their damaged forms."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cairn.core.errors import DataError
from cairn.train.data.llmc import LlmC
from cairn.train.data.megatron import Megatron
from cairn.train.data.open_tokens import open_tokens
from cairn.train.data.tokens import document, documents

CODES = {4: "<i4", 8: "<u2", 5: "<i8"}


def write_megatron(stem: Path, written, code: int = 8, modes: bool = False) -> Path:
    """`written`: documents as lists of sequences of ids."""
    sequences = [np.asarray(ids, CODES[code]) for document in written for ids in document]
    stem.with_name(stem.name + ".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    pointers = np.cumsum([0, *(ids.nbytes for ids in sequences)])[:-1].astype("<i8")
    ends = np.cumsum([0, *map(len, written)]).astype("<i8")
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(sequences), len(ends))
    tail = b"\0" * len(sequences) if modes else b""
    index = head + lengths.tobytes() + pointers.tobytes() + ends.tobytes() + tail
    stem.with_name(stem.name + ".idx").write_bytes(index)
    return stem


def write_llmc(path: Path, ids, magic: int = 20240520, version: int = 1, dtype="<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    path.write_bytes(header.tobytes() + np.asarray(ids, dtype).tobytes())
    return path


IDS = st.lists(st.integers(0, 60000), min_size=1, max_size=6)


@given(
    st.lists(st.lists(IDS, min_size=1, max_size=3), min_size=1, max_size=5),
    st.sampled_from([4, 5, 8]),
    st.booleans(),
)
def test_megatron_documents_are_runs_of_sequences(tmp_path_factory, written, code, modes):
    stem = write_megatron(
        tmp_path_factory.mktemp("m") / "corpus_text_document", written, code, modes
    )
    for name in (stem, f"{stem}.bin", f"{stem}.idx"):
        tokens = open_tokens(name)
        assert tokens.format == "Megatron"
        found = [document(tokens, number).tolist() for number in range(documents(tokens))]
        assert found == [[id for ids in parts for id in ids] for parts in written]


def test_damaged_megatron_files_are_refused(tmp_path):
    stem = write_megatron(tmp_path / "m", [[[1, 2, 3]], [[4], [5, 6]]])
    index, data = Path(f"{stem}.idx"), Path(f"{stem}.bin")
    good, tokens = index.read_bytes(), data.read_bytes()
    for length in (0, 5, 20, len(good) - 1):
        index.write_bytes(good[:length])
        with pytest.raises(DataError, match="damaged"):
            Megatron(stem)
    index.write_bytes(good[:9] + struct.pack("<Q", 2) + good[17:])
    with pytest.raises(DataError, match="version 2"):
        Megatron(stem)
    index.write_bytes(good[:17] + b"\x07" + good[18:])
    with pytest.raises(DataError, match="type code 7"):
        Megatron(stem)
    moved = bytearray(good)
    moved[34 + 12 + 8] += 2  # the pointer of the second sequence
    index.write_bytes(moved)
    with pytest.raises(DataError, match=r"sequence 1 of .* is at byte 8, not 6"):
        Megatron(stem)
    index.write_bytes(good)
    data.write_bytes(tokens[:-1])
    with pytest.raises(DataError, match="truncated or empty: 11 bytes"):
        Megatron(stem)
    data.unlink()
    with pytest.raises(DataError):
        Megatron(stem)


def test_llmc_documents_begin_with_their_token(tmp_path):
    path = write_llmc(tmp_path / "gpt2.bin", [50256, 1, 2, 50256, 3])
    tokens = open_tokens(path)
    assert tokens.format == "llm.c"
    assert [document(tokens, n).tolist() for n in range(2)] == [[50256, 1, 2], [50256, 3]]
    late = LlmC(write_llmc(tmp_path / "late.bin", [7, 8, 50256, 3]))
    assert late.offsets.tolist() == [0, 2, 4]
    llama = LlmC(write_llmc(tmp_path / "l.bin", [128000, 100_000], 20240801, 7, "<u4"))
    assert llama.read(0, 2).tolist() == [128000, 100_000]


def test_damaged_llmc_files_are_refused(tmp_path):
    path = write_llmc(tmp_path / "x.bin", [50256, 1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="1029 bytes, and its header speaks of 3 tokens in 1030"):
        LlmC(path)
    with pytest.raises(DataError, match="magic 20240520 and version 3"):
        LlmC(write_llmc(tmp_path / "v.bin", [1], version=3))
    with pytest.raises(DataError, match="speaks of 0 tokens"):
        LlmC(write_llmc(tmp_path / "e.bin", []))


def test_a_folder_of_shards_is_one_corpus(tmp_path):
    for number in range(3):
        write_llmc(tmp_path / f"shard_{number}.bin", [50256, number])
    tokens = open_tokens(tmp_path)
    assert tokens.format == "3 x llm.c"
    assert [document(tokens, n).tolist() for n in range(3)] == [[50256, n] for n in range(3)]


def test_what_is_no_data_is_refused_with_a_way_out(tmp_path):
    with pytest.raises(DataError, match="there is no data at"):
        open_tokens(tmp_path / "nothing")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="is text, not tokens") as refused:
        open_tokens(tmp_path / "a.txt")
    assert "cairn data tokenize" in (refused.value.hint or "")
    (tmp_path / "a.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(DataError, match="no format that can be trained on"):
        open_tokens(tmp_path / "a.bin")
