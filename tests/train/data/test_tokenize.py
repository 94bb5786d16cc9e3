"""Text files and chats to stores: the same whatever the workers, and bad input refused with its place."""

import codecs
import gzip
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import tiny_tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from cairn.core.errors import CairnError, ConfigError, DataError, UsageError
from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.train.data import documents as documents_module
from cairn.train.data import text_files
from cairn.train.data.chat_files import read_chat
from cairn.train.data.chats import chat
from cairn.train.data.documents import Reading, cuts_cleanly, pieces
from cairn.train.data.ordered_pool import ordered_map
from cairn.train.data.procedural import small_tokenizer
from cairn.train.data.store import Store
from cairn.train.data.stories import story
from cairn.train.data.text_files import find_files
from cairn.train.data.tokenize import Options, tokenize
from cairn.train.data.tokenize_chats import tokenize_chats
from cairn.train.data.tokenizer_trainer import byte_tokenizer
from cairn.train.data.tokens import document, documents

BYTES = byte_tokenizer()
END = "<|endoftext|>"


def texts_of(path: Path, tokenizer=BYTES) -> list[str]:
    store = Store(path)
    return [
        tokenizer.decode(document(store, n).tolist(), skip_special=False)
        for n in range(documents(store))
    ]


def put(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def run(tmp_path: Path, *files: Path, tokenizer=BYTES, **options) -> list[str]:
    tokenize(find_files(files), tokenizer, tmp_path / "out", Options(replace=True, **options))
    return texts_of(tmp_path / "out", tokenizer)


def test_every_kind_of_file_gives_its_documents(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    zstandard = pytest.importorskip("zstandard", reason="needs zstandard")
    lines = '{"text": "one é"}\n\n{"text": "two", "more": 1}\n'
    table = pyarrow.table({"text": ["p1", None, "p2"], "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=1)
    put(tmp_path / "a.txt", "plain text\nof two lines")
    put(tmp_path / "b.jsonl", lines)
    put(tmp_path / "c.jsonl.gz", gzip.compress(lines.encode()))
    put(tmp_path / "e.jsonl.zst", zstandard.compress(lines.encode()))
    expected = [
        "plain text\nof two lines",
        "one é",
        "two",
        "one é",
        "two",
        "p1",
        "p2",
        "one é",
        "two",
    ]
    assert run(tmp_path, tmp_path) == [text + END for text in expected]
    header = Store(tmp_path / "out").header
    assert header.sources == ["a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet", "e.jsonl.zst"]
    assert header.text_bytes == sum(len(text.encode()) for text in expected)


def test_a_byte_order_mark_is_no_text(tmp_path):
    line = '{"text": "one é"}\r\n'
    put(tmp_path / "a.txt", codecs.BOM_UTF8 + b"plain")
    put(tmp_path / "b.jsonl", codecs.BOM_UTF8 + line.encode() * 2)
    put(tmp_path / "c.json", codecs.BOM_UTF8 + b'[{"text": "in a list"}]')
    texts = ["plain", "one é", "one é", "in a list"]
    assert run(tmp_path, tmp_path) == [text + END for text in texts]


def test_the_store_does_not_depend_on_the_workers(tmp_path):
    rows = [{"text": story(0, number) * (1 + number % 7)} for number in range(900)]
    file = put(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    tokenizer = small_tokenizer(("stories",), vocab=500)
    written = []
    for workers in (1, 2):
        done = tokenize(
            find_files([file]), tokenizer, tmp_path / f"s{workers}", Options(workers=workers)
        )
        assert done.documents == 900
        files = sorted(path for path in (tmp_path / f"s{workers}").rglob("*") if path.is_file())
        written.append([(path.name, path.read_bytes()) for path in files])
    assert written[0] == written[1]
    assert texts_of(tmp_path / "s1", tokenizer)[17] == rows[17]["text"] + END


def test_a_long_document_in_pieces_has_the_tokens_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "PIECE_CHARS", 300)
    monkeypatch.setattr(documents_module, "_BLOCK", 97)
    tokenizer = small_tokenizer(("stories",), vocab=500)
    text = "\n".join(story(1, number) + "  \n\n é 12\n" for number in range(40))
    file = put(tmp_path / "a.txt", text)
    parts = list(pieces(find_files([file])[0], Reading(), lambda count: None))
    assert len(parts) > 20
    assert "".join(part.text for part in parts) == text
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
    run(tmp_path, file, tokenizer=tokenizer)
    ids = document(Store(tmp_path / "out"), 0).tolist()
    assert ids == [*tokenizer.encode(text), tokenizer.eos_ids[0]]


@given(st.text(st.sampled_from("ab\n- é"), max_size=80), st.sampled_from(["\n\n", "--", "\nab"]))
@example(text="b" * 13 + "\nab" + "b", separator="\nab")  # a block ends within the separator
def test_a_separator_is_found_wherever_the_blocks_end(tmp_path_factory, text, separator):
    """Read 3 bytes at a time, with pieces of 5 characters: the documents are those of str.split."""
    file = put(tmp_path_factory.mktemp("f") / "a.txt", text or "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "PIECE_CHARS", 5)
        patch.setattr(documents_module, "_BLOCK", 3)
        found = [""]
        for piece in pieces(find_files([file])[0], Reading(separator=separator), lambda n: None):
            found[-1] += piece.text
            if piece.last:
                found.append("")
    assert found[:-1] == (text or "a").split(separator)


def test_text_that_looks_special_is_plain_text_unless_asked(tmp_path):
    file = put(tmp_path / "a.txt", f"one{END}<|im_start|>assistant")
    run(tmp_path, file)
    ids = document(Store(tmp_path / "out"), 0).tolist()
    assert [id for id in ids if id < 4] == [0]  # the end of the document, and nothing else
    assert BYTES.decode(ids[:-1]) == f"one{END}<|im_start|>assistant"
    run(tmp_path, file, special=True)
    assert [id for id in document(Store(tmp_path / "out"), 0).tolist() if id < 4] == [0, 1, 0]
    assert run(tmp_path, file, end_of_text=False)[0].endswith("assistant")


def test_a_tokenizer_with_a_begin_token_and_spaces_of_its_own(tmp_path, monkeypatch):
    """SentencePiece puts a space before the first word of a text, so its documents are never cut."""
    monkeypatch.setattr(documents_module, "PIECE_CHARS", 20)
    backend = tiny_tokenizers.sentencepiece()
    ids = {name: backend.token_to_id(name) for name in ("<s>", "</s>")}
    tokenizer = Tokenizer(backend, SpecialTokens({}, ids["<s>"], (ids["</s>"],)))
    assert not cuts_cleanly(tokenizer)
    assert cuts_cleanly(BYTES)
    text = "the park\nthe girl\n" * 20
    run(tmp_path, put(tmp_path / "a.txt", text), tokenizer=tokenizer)
    assert document(Store(tmp_path / "out"), 0).tolist() == [*tokenizer.encode(text), ids["</s>"]]
    without = Tokenizer(backend, SpecialTokens({}, ids["<s>"], ()))
    with pytest.raises(ConfigError, match="no end-of-text token"):
        run(tmp_path, tmp_path / "a.txt", tokenizer=without)


def test_empty_documents_are_counted_and_left_out(tmp_path):
    file = put(tmp_path / "a.jsonl", '{"text": ""}\n{"text": "x"}\n{"text": null}\n')
    done = tokenize(find_files([file]), BYTES, tmp_path / "s")
    assert (done.documents, done.empty) == (1, 2)
    only = put(tmp_path / "b.jsonl", '{"text": ""}\n')
    with pytest.raises(DataError, match="no document has a token"):
        tokenize(find_files([only]), BYTES, tmp_path / "t")


BAD = {
    "a.jsonl": (b'{"text": "ok"}\n{"text": }\n', r"a\.jsonl line 2 is not JSON"),
    "b.jsonl": (b'{"text": "ok"}\n\n{"text": "\xff"}', r"b\.jsonl line 3 is not UTF-8"),
    "c.jsonl": (b'{"txt": "ok"}', r"line 1 has no field 'text'; it has: txt"),
    "d.jsonl": (b'{"text": 5}', r"line 1: field 'text' is int"),
    "e.jsonl": (b"[1]", r"line 1 has no field 'text'; it has: list"),
    "f.txt": (b"one\ntwo\nthr\xe9e\n", r"f\.txt line 3 \(byte 11\) is not UTF-8"),
    "g.txt": (b"cut off \xc3", r"g\.txt line 1 \(its end\) is not UTF-8"),
    "h.jsonl": (rb'{"text": "\ud800"}', r"h\.jsonl line 1 is not JSON"),
    "i.jsonl.gz": (gzip.compress(b'{"text": "ok"}\n' * 99)[:-9], r"truncated or damaged"),
    "j.jsonl.gz": (b'{"text": "not packed"}', r"j\.jsonl\.gz is truncated or damaged"),
    "k.parquet": (b"PAR1 not really", r"cannot be read as parquet"),
    "l.jsonl.zst": (b'{"text": "not packed"}', r"l\.jsonl\.zst is truncated or damaged"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_with_the_place(tmp_path, name):
    content, message = BAD[name]
    for kind, package in ((".parquet", "pyarrow"), (".zst", "zstandard")):
        if name.endswith(kind):
            pytest.importorskip(package)
    file = put(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        tokenize(find_files([file]), BYTES, tmp_path / "s")
    assert os.listdir(tmp_path) == [name]  # no store, and no rest of one


def test_a_bad_line_ends_the_work_of_many_workers_too(tmp_path):
    good = json.dumps({"text": "word " * 20_000})
    file = put(tmp_path / "a.jsonl", "\n".join([*[good] * 20, "{"]))
    with pytest.raises(DataError, match="line 21 is not JSON"):
        tokenize(find_files([file]), BYTES, tmp_path / "s", Options(workers=2))
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_missing_empty_and_unknown_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="there is no file"):
        find_files([tmp_path / "no.txt"])
    with pytest.raises(DataError, match="no text files in"):
        find_files([tmp_path])
    with pytest.raises(DataError, match="is empty"):
        find_files([put(tmp_path / "a.txt", "")])
    with pytest.raises(UsageError, match="of no known kind"):
        find_files([put(tmp_path / "a.exe", "x")])
    monkeypatch.setattr(text_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CairnError, match="without the Python package pyarrow"):
        find_files([put(tmp_path / "a.parquet", "x")])


def test_a_disk_without_room_is_refused_before_the_work(tmp_path, monkeypatch):
    file = put(tmp_path / "a.txt", "text " * 1000)
    usage = type("Usage", (), {"free": 100})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DataError, match=r"needs at least .* and the disk has 100 B free"):
        tokenize(find_files([file]), BYTES, tmp_path / "s")
    assert os.listdir(tmp_path) == ["a.txt"]


def dies(at: int):
    return lambda unit: os._exit(9) if unit == at else unit


def test_a_worker_that_dies_is_an_error_and_not_a_hang():
    with pytest.raises(CairnError, match="a worker process died"):
        list(ordered_map(dies, (7,), range(100), 2))
    with pytest.raises(ConfigError, match="0 workers"):
        list(ordered_map(dies, (7,), range(3), 0))
    assert list(ordered_map(dies, (7,), range(3), 1)) == [0, 1, 2]


def test_workers_leave_when_their_parent_is_killed():
    program = """
        import operator, os, signal
        from cairn.train.data.ordered_pool import ordered_map
        for answer in ordered_map(operator.attrgetter, ("real",), range(100), 2):
            print(answer, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    # It returns when the last process that holds its output has gone, so a worker that stays is seen.
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "0\n"


def test_chats_become_a_store_with_masks_whatever_the_workers(tmp_path):
    chats = [chat(0, number) for number in range(300)]
    file = put(tmp_path / "a.jsonl", "\n".join(json.dumps({"messages": c}) for c in chats))
    sharegpt = [
        {
            "conversations": [
                {
                    "from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
                    "value": m["content"],
                }
                for m in c
            ]
        }
        for c in chats
    ]
    other = put(tmp_path / "b.jsonl", "\n".join(map(json.dumps, sharegpt)))
    done = tokenize_chats(find_files([file]), BYTES, tmp_path / "s", workers=1)
    for path, workers in ((file, 2), (other, 1)):
        again = tokenize_chats(
            find_files([path]), BYTES, tmp_path / "t", workers=workers, replace=True
        )
        assert again._replace(text_bytes=0) == done._replace(text_bytes=0)
        for name in ("tokens.bin", "learn.bin"):
            assert (tmp_path / "s" / name).read_bytes() == (tmp_path / "t" / name).read_bytes()
    store = Store(tmp_path / "s")
    assert done.longest == int(np.diff(store.offsets).max())
    for number, messages in enumerate(chats):
        start, stop = store.offsets[number : number + 2].tolist()
        said = store.read(start, stop)[store.mask(start, stop)]
        expected = "".join(
            m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"
        )
        assert BYTES.decode(said.tolist(), skip_special=False) == expected


def test_pairs_are_chats_too():
    messages = read_chat(b'{"instruction": "Add", "input": "1 2", "output": "3"}', "x").messages
    assert messages == [
        {"role": "user", "content": "Add\n\n1 2"},
        {"role": "assistant", "content": "3"},
    ]
    assert read_chat(b'{"question": "q", "answer": "a"}', "x").messages[1]["content"] == "a"
    with_system = b'{"conversations": [{"from": "human", "value": "x"}], "system": "s"}'
    assert read_chat(with_system, "x").messages[0] == {"role": "system", "content": "s"}


BAD_CHATS = {
    '{"text": "x"}': "line 2 is no chat; it has the fields: text",
    '{"messages": []}': "line 2: messages is empty",
    '{"messages": [{"role": "user", "content": "x"}]}': "line 2: the assistant says nothing",
    '{"messages": [{"content": "x"}]}': r"line 2: messages\[0\].role is None",
    '{"conversations": [{"from": "alien", "value": "x"}]}': r"conversations\[0\] is from 'alien'",
    '{"conversations": [{"from": "gpt"}]}': r"conversations\[0\] has no text",
    '{"conversations": 3}': "conversations is int",
    '{"messages": "hello"}': "messages is str",
    "[]": "line 2 holds list",
    "{": "line 2 is not JSON",
}


@pytest.mark.parametrize("line", BAD_CHATS)
def test_bad_chats_are_refused_with_their_line(tmp_path, line):
    good = json.dumps({"messages": chat(0, 1)})
    file = put(tmp_path / "a.jsonl", f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=BAD_CHATS[line]):
        tokenize_chats(find_files([file]), BYTES, tmp_path / "s")
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_chat_that_is_too_long_is_refused_with_its_line(tmp_path):
    file = put(tmp_path / "a.jsonl", json.dumps({"messages": chat(0, 0)}) + "\n")
    with pytest.raises(DataError, match=r"line 1: the chat has \d+ tokens, more than 20"):
        tokenize_chats(find_files([file]), BYTES, tmp_path / "s", longest=20)
    with pytest.raises(DataError, match="chats are read from jsonl"):
        tokenize_chats(find_files([put(tmp_path / "a.txt", "x")]), BYTES, tmp_path / "s")
