"""Text and jsonl files as a source of training data: tokenized once, into a store that is kept with the run.

    notes.txt, corpus/, talk.jsonl  --the first process that needs it-->  CACHE/NAME-KEY   a token store

The key names the files (with sizes and times), the tokenizer and the field, so a resumed run finds its store again, and
a file that has changed becomes another one. Several processes of a run share the work: one tokenizes, the others wait.
For much text or many runs, `cairn data tokenize` once is cheaper.
"""

import fcntl
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from cairn.models.tokenizer import Tokenizer
from cairn.report.progress import byte_progress
from cairn.train.data.chat_files import chat_lines, is_chat, read_chat
from cairn.train.data.documents import Reading, decode_line, pieces
from cairn.train.data.open_tokens import is_tokens
from cairn.train.data.ordered_pool import available_cores
from cairn.train.data.store import is_store
from cairn.train.data.text_files import TextFile, find_files, kind_of, lines
from cairn.train.data.tokenize import Options, tokenize
from cairn.train.data.tokenize_chats import tokenize_chats
from cairn.train.data.tokenizer_identity import tokenizer_hash

ALL_CORES = 32 << 20  # bytes of text from which more than one process is worth its start
READ_FOR_TOKENIZER = 4_000_000  # characters that a small tokenizer is trained on


def is_raw(path: Path) -> bool:
    """Return whether this is a text or jsonl file, or a folder with only such files."""
    if path.is_file():
        return kind_of(path) in ("text", "jsonl")
    if not path.is_dir() or is_tokens(path):
        return False
    kinds = {kind_of(entry) for entry in path.rglob("*") if entry.is_file()}
    return bool(kinds & {"text", "jsonl"}) and "parquet" not in kinds


def holds_chats(path: Path) -> bool:
    """Return whether the first line of the first file is a chat."""
    file = find_files([path])[0]
    if file.kind != "jsonl":
        return False
    first = next(lines(file, _unwatched), None)
    return first is not None and is_chat(decode_line(first[1], f"{file.path} line {first[0]}"))


def store_of(path: Path, tokenizer: Tokenizer, cache: Path, field: str = "text") -> Path:
    """The token store of these files; made where it is not there yet."""
    files = find_files([path])
    target = cache / f"{path.stem}-{_key(path, files, tokenizer, field)}"
    if is_store(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes of the run wait here for the first one
        if not is_store(target):
            _make(path, files, tokenizer, target, field)
    return target


def texts_of(paths: Sequence[Path], field: str = "text") -> Iterator[str]:
    """The beginning of all texts, as much as a small tokenizer is trained on; of each path an equal part."""
    most = READ_FOR_TOKENIZER // max(1, len(paths))
    for path in paths:
        read = 0
        for text in _chat_texts(path) if holds_chats(path) else _plain_texts(path, field):
            yield text
            read += len(text)
            if read >= most:
                break


def _make(
    path: Path, files: list[TextFile], tokenizer: Tokenizer, target: Path, field: str
) -> None:
    size = sum(file.bytes for file in files)
    workers = available_cores() if size > ALL_CORES else 1
    with byte_progress(size, f"tokenizing {path.name}") as advance:
        if holds_chats(path):
            tokenize_chats(files, tokenizer, target, workers=workers, advance=advance)
            return
        options = Options(reading=Reading(field=field), workers=workers)
        tokenize(files, tokenizer, target, options, advance)


def _key(path: Path, files: list[TextFile], tokenizer: Tokenizer, field: str) -> str:
    named = [
        [
            str(file.path.relative_to(path) if path.is_dir() else file.path.name),
            file.bytes,
            file.path.stat().st_mtime_ns,
        ]
        for file in files
    ]
    identity = [named, field, tokenizer_hash(tokenizer), tokenizer.templates.sources]
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]


def _plain_texts(path: Path, field: str) -> Iterator[str]:
    reading = Reading(field=field)
    files = find_files([path])
    return (piece.text for file in files for piece in pieces(file, reading, _unwatched))


def _chat_texts(path: Path) -> Iterator[str]:
    lines_by_file = (chat_lines(file, _unwatched) for file in find_files([path]))
    for where, line in itertools.chain.from_iterable(lines_by_file):
        for message in read_chat(line, where).messages:
            if isinstance(message.get("content"), str):
                yield message["content"]


def _unwatched(count: int) -> None:
    """An `Advance` that is not shown."""
