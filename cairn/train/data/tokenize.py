"""Text files to a token store, on all cores. The store is the same whatever the number of workers.

    files --pieces--> units of about 256k characters --workers--> ids --join, end of text--> store

Each document becomes the tokenizer's begin token (where its rules add one), its text, and the end-of-text token. What
looks like a special token in the text is read as plain text unless asked otherwise, so that no document can
end another or speak as the assistant.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cairn.core.errors import ConfigError, DataError
from cairn.core.units import format_bytes
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.documents import Piece, Reading, check_field, cuts_cleanly, pieces
from cairn.train.data.ordered_pool import ordered_map
from cairn.train.data.store_writer import StoreWriter, check_free
from cairn.train.data.text_files import Advance, TextFile

UNIT_CHARS = 1 << 18
UNIT_PIECES = 1024
_LEAST_TOKENS_PER_BYTE = 1 / 8  # of text that compresses very well


class Options(NamedTuple):
    reading: Reading = Reading()
    end_of_text: bool = True  # whether to end each document with the tokenizer's first EOS
    special: bool = False  # whether text such as <|endoftext|> becomes the special token
    workers: int = 1
    replace: bool = False


PLAIN = Options()


class Totals(NamedTuple):
    documents: int
    tokens: int
    empty: int  # documents without text, which are left out
    text_bytes: int


class Unit(NamedTuple):
    texts: list[str]
    lasts: list[bool]
    where: list[str]


class Encoded(NamedTuple):
    ids: np.ndarray
    lengths: list[int]
    lasts: list[bool]
    text_bytes: int


def tokenize(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    out: Path,
    options: Options = PLAIN,
    advance: Advance = lambda count: None,
) -> Totals:
    """Write the store `out`; everything that can be refused is refused before the first token."""
    check_free(out, options.replace)
    begin, end = _framing(tokenizer, options.end_of_text)
    for file in files:
        check_field(file, options.reading)
    with StoreWriter(out, tokenizer, replace=options.replace) as writer:
        check_room(files, out, writer.dtype.itemsize)
        writer.sources = [file.path.name for file in files]
        reading = options.reading._replace(cut=options.reading.cut and cuts_cleanly(tokenizer))
        encoded = ordered_map(
            TextEncoder,
            (tokenizer.backend.to_str(), options.special),
            units(files, reading, advance),
            options.workers,
        )
        empty = _write(encoded, writer, begin, end)
        return Totals(writer.documents, writer.tokens, empty, writer.text_bytes)


def _framing(tokenizer: Tokenizer, end_of_text: bool) -> tuple[list[int], list[int]]:
    """The ids before and after each document."""
    around = tokenizer.encode("", special=True)
    begin = [id for id in around[:1] if id == tokenizer.bos_id]
    if not end_of_text:
        return begin, []
    if not tokenizer.eos_ids:
        raise ConfigError(
            f"{tokenizer.source} has no end-of-text token to put between documents",
            hint="pass --no-end-of-text; the store keeps their boundaries anyway",
        )
    return begin, [tokenizer.eos_ids[0]]


def check_room(files: Sequence[TextFile], out: Path, itemsize: int) -> None:
    """Refuse at once what cannot fit on the disk."""
    least = int(sum(file.bytes for file in files) * _LEAST_TOKENS_PER_BYTE * itemsize)
    folder = next(parent for parent in (out, *out.absolute().parents) if parent.exists())
    free = shutil.disk_usage(folder).free
    if least > free:
        raise DataError(
            f"{out} needs at least {format_bytes(least)}, and the disk has {format_bytes(free)} free",
            hint="write to another disk with --out",
        )


def units(files: Iterable[TextFile], reading: Reading, advance: Advance) -> Iterator[Unit]:
    """Pieces in groups that are worth a message between processes."""
    group: list[Piece] = []
    chars = 0
    for file in files:
        for piece in pieces(file, reading, advance):
            group.append(piece)
            chars += len(piece.text)
            if chars >= UNIT_CHARS or len(group) >= UNIT_PIECES:
                yield _unit(group)
                group, chars = [], 0
    if group:
        yield _unit(group)


def _unit(group: list[Piece]) -> Unit:
    return Unit(
        [piece.text for piece in group],
        [piece.last for piece in group],
        [piece.where for piece in group],
    )


def _write(
    encoded: Iterable[Encoded], writer: StoreWriter, begin: list[int], end: list[int]
) -> int:
    """Joins pieces to documents as they come; returns how many documents were empty."""
    first, behind = np.asarray(begin, np.uint32), np.asarray(end, np.uint32)
    size = empty = 0  # tokens so far of the document at hand
    for unit in encoded:
        writer.text_bytes += unit.text_bytes
        parts: list[np.ndarray] = []
        lengths: list[int] = []
        edges = np.cumsum([0, *unit.lengths])
        for at, last in enumerate(unit.lasts):
            ids = unit.ids[edges[at] : edges[at + 1]]
            if len(ids):
                parts += [ids] if size else [first, ids]
                size += len(ids) + (0 if size else len(first))
            if last and size:
                parts.append(behind)
                lengths.append(size + len(behind))
            empty += last and not size
            size = 0 if last else size
        if parts:
            writer.add_many(np.concatenate(parts), lengths)
    return empty


class TextEncoder:
    """Worker function: encodes texts to ids."""

    def __init__(self, backend: str, special: bool) -> None:
        import tokenizers

        self._backend = tokenizers.Tokenizer.from_str(backend)
        self._backend.encode_special_tokens = not special

    def __call__(self, unit: Unit) -> Encoded:
        try:
            encodings = self._backend.encode_batch_fast(unit.texts, add_special_tokens=False)
        except TypeError as error:
            raise _refused(unit, error) from None
        lengths = [len(encoding.ids) for encoding in encodings]
        ids = np.concatenate([np.asarray(encoding.ids, np.uint32) for encoding in encodings])
        size = sum(len(text.encode()) for text in unit.texts)
        return Encoded(ids, lengths, unit.lasts, size)


def _refused(unit: Unit, error: TypeError) -> DataError:
    """Error that names the text which cannot be encoded."""
    for text, where in zip(unit.texts, unit.where, strict=True):
        try:
            text.encode()
        except UnicodeEncodeError as wrong:
            return DataError(f"{where} has half of a surrogate pair at character {wrong.start}")
    return DataError(f"a text near {unit.where[0]} cannot be encoded: {error}")
