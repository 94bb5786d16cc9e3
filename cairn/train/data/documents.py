"""The documents in text files, a piece at a time, so that a file of any size fits in memory.

    text       the whole file is a document; with a separator, what stands between two of them
    jsonl      one per line, in the field `text` or another
    parquet    one per row, in the column `text` or another

A document beyond half a million characters comes in pieces that end where a line ends and a letter follows: there a
byte-level tokenizer splits anyway, so the tokens are the same. What cannot be read is refused with file and line.
"""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from cairn.core.errors import DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.text_files import Advance, TextFile, lines, opened

PIECE_CHARS = 1 << 18
_BLOCK = 1 << 20
_LINE_THEN_LETTER = re.compile(r"\n(?=[^\W\d_])")


class Reading(NamedTuple):
    """Options for reading documents from files."""

    field: str = "text"  # of jsonl and parquet
    separator: str | None = None  # of text files
    cut: bool = True  # whether long documents may come in pieces


class Piece(NamedTuple):
    text: str
    last: bool  # whether the document ends with it
    where: str  # file and line, for messages


def pieces(file: TextFile, reading: Reading, advance: Advance) -> Iterator[Piece]:
    """All documents of a file, in order; every document has exactly one last piece."""
    match file.kind:
        case "text":
            yield from _text_pieces(file, reading, advance)
        case "jsonl":
            for number, line in lines(file, advance):
                where = f"{file.path} line {number}"
                yield from _cut(text_field(line, reading.field, where), where, reading)
        case "parquet":
            for row, text in enumerate(parquet_texts(file.path, reading.field, advance)):
                yield from _cut(text or "", f"{file.path} row {row}", reading)


def check_field(file: TextFile, reading: Reading) -> None:
    """Refuse a file whose first document cannot be read, before the work on all of them begins."""
    next(pieces(file, reading, lambda count: None), None)


def cuts_cleanly(tokenizer: Tokenizer) -> bool:
    """Return whether text may be encoded in pieces, which fails if the first word of a text is special."""
    halves = ("One line, 12 words.\nand\n\n", "Then another; it's\n  more.\n", "last")
    whole = tokenizer.encode("".join(halves), special=False)
    return whole == [id for half in halves for id in tokenizer.encode(half, special=False)]


def text_field(line: bytes, field: str, where: str) -> str:
    """The text in one line of JSON."""
    value = decode_line(line, where)
    if not isinstance(value, dict) or field not in value:
        content = ", ".join(map(str, value)) if isinstance(value, dict) else type(value).__name__
        names = set(value) if isinstance(value, dict) else set()
        raise DataError(f"{where} has no field {field!r}; it has: {content}", hint=_meant(names))
    text = value[field]
    if text is not None and not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is {type(text).__name__}, not text")
    return text or ""


def _meant(names: set[str]) -> str:
    """Hint for lines that have these fields and no text."""
    if names & {"messages", "conversations"}:
        return "chats are tokenized with --chat"
    if names & {"chosen", "rejected"}:
        return "preferences are learnt with --objective.kind dpo --validation.share 0"
    return "name the field that has the text: --data.field of cairn train, --field of cairn data"


def decode_line(line: bytes, where: str) -> object:
    try:
        return msgspec.json.decode(line)
    except UnicodeDecodeError as error:
        raise _not_utf8(where, error) from None
    except msgspec.DecodeError as error:
        try:
            line.decode()
        except UnicodeDecodeError as invalid:
            raise _not_utf8(where, invalid) from None
        raise DataError(f"{where} is not JSON: {error}", hint=f"it is {line[:60]!r}") from None


def parquet_texts(path: Path, column: str, advance: Advance) -> Iterator[str | None]:
    """Yield the texts of a column, one row group at a time."""
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            check_column(path, table.schema_arrow, column)
            for group in range(table.num_row_groups):
                for batch in table.iter_batches(1024, row_groups=[group], columns=[column]):
                    yield from batch.column(0).to_pylist()
                advance(path.stat().st_size // max(1, table.num_row_groups))
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as parquet: {error}", hint="copy it again"
        ) from None


def check_column(path: Path, schema: object, column: str) -> None:
    import pyarrow

    assert isinstance(schema, pyarrow.Schema)
    if column not in schema.names:
        raise DataError(
            f"{path} has no column {column!r}; it has: {', '.join(schema.names)}",
            hint="name the column: --field of `cairn data tokenize`, --data.field of `cairn train`",
        )
    kind = schema.field(column).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise DataError(f"column {column!r} of {path} holds {kind}, not text")


def _text_pieces(file: TextFile, reading: Reading, advance: Advance) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # without a byte order mark
    buffer, where, line, at = "", str(file.path), 1, 0
    with opened(file, advance) as stream:
        while content := stream.read(_BLOCK):
            try:
                buffer += decoder.decode(content)
            except UnicodeDecodeError as error:
                before = error.object[: error.start]  # the bytes it had kept and this block
                wrong = line + before.count(b"\n")
                offset = at + len(content) - len(error.object) + error.start
                raise _not_utf8(f"{where} line {wrong} (byte {offset})", error) from None
            line, at = line + content.count(b"\n"), at + len(content)
            if reading.separator:
                *whole, buffer = buffer.split(reading.separator)
                for text in whole:
                    yield from _cut(text, where, reading)
            while reading.cut and len(buffer) > 2 * PIECE_CHARS:
                end = _clean_end(buffer, len(buffer) - len(reading.separator or ""))
                if end is None:
                    break
                yield Piece(buffer[:end], False, where)
                buffer = buffer[end:]
    try:
        buffer += decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where} line {line} (its end)", error) from None
    yield from _cut(buffer, where, reading)


def _cut(text: str, where: str, reading: Reading) -> Iterator[Piece]:
    while reading.cut and len(text) > 2 * PIECE_CHARS:
        end = _clean_end(text, len(text))
        if end is None:
            break
        yield Piece(text[:end], False, where)
        text = text[end:]
    yield Piece(text, True, where)


def _clean_end(text: str, limit: int) -> int | None:
    """Cut position after a line end before a letter: the last one within the piece size, else the next one."""
    at = text.rfind("\n", 0, min(PIECE_CHARS, limit - 1))
    while at >= 0 and not text[at + 1].isalpha():
        at = text.rfind("\n", 0, at)
    if at >= 0:
        return at + 1
    match = _LINE_THEN_LETTER.search(text, min(PIECE_CHARS, limit), limit)
    return match.end() if match else None


def _not_utf8(where: str, error: UnicodeDecodeError) -> DataError:
    wrong = error.object[error.start : error.start + 4]
    return DataError(
        f"{where} is not UTF-8: {error.reason} at {wrong!r}",
        hint="convert it, such as with: iconv -f latin1 -t utf8",
    )
