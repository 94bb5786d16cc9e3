"""Chats to a token store that knows which tokens are the assistant's, on all cores.

    jsonl lines --workers: parse, render, encode, mask--> ids + learn --> store with learn.bin

Each chat is one document. The first bad line ends the work with its file and number, and leaves no store behind.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from cairn.core.errors import CairnError, DataError
from cairn.models.tokenizer import SpecialTokens, Tokenizer
from cairn.train.data.chat_files import chat_lines, read_chat
from cairn.train.data.chat_tokens import ChatEncoder, ChatTokens
from cairn.train.data.ordered_pool import ordered_map
from cairn.train.data.store_writer import StoreWriter, check_free
from cairn.train.data.text_files import Advance, TextFile
from cairn.train.data.tokenize import check_room

UNIT_BYTES = 1 << 17

Lines = list[tuple[str, bytes]]


class ChatTotals(NamedTuple):
    documents: int
    tokens: int
    learnt: int  # tokens that have a loss
    open_ends: int  # answers that the template does not end with a token
    longest: int  # tokens of the longest chat: the sequence_length that cuts nothing
    text_bytes: int


class Encoded(NamedTuple):
    ids: np.ndarray
    learn: np.ndarray
    lengths: list[int]
    open_ends: int


def tokenize_chats(
    files: Sequence[TextFile],
    tokenizer: Tokenizer,
    out: Path,
    *,
    longest: int | None = None,
    workers: int = 1,
    replace: bool = False,
    advance: Advance = lambda count: None,
) -> ChatTotals:
    """Write the store `out`; a chat of more than `longest` tokens is refused with its line."""
    check_free(out, replace)
    encoder = LineEncoder(*_parts(tokenizer), longest)
    for file in files:  # the first chat of each file shows most mistakes, before the work begins
        for line in chat_lines(file, lambda count: None):
            encoder([line])
            break
    learnt = open_ends = 0
    with StoreWriter(out, tokenizer, learn=True, replace=replace) as writer:
        check_room(files, out, writer.dtype.itemsize)
        writer.sources = [file.path.name for file in files]
        writer.text_bytes = sum(file.bytes for file in files)
        encoded = ordered_map(
            LineEncoder, (*_parts(tokenizer), longest), units(files, advance), workers
        )
        for unit in encoded:
            writer.add_many(unit.ids, unit.lengths, unit.learn)
            learnt += int(unit.learn.sum())
            open_ends += unit.open_ends
        most = int(writer.lengths().max(initial=0))
        return ChatTotals(
            writer.documents, writer.tokens, learnt, open_ends, most, writer.text_bytes
        )


def units(files: Iterable[TextFile], advance: Advance) -> Iterator[Lines]:
    group: Lines = []
    size = 0
    for file in files:
        for where, line in chat_lines(file, advance):
            group.append((where, line))
            size += len(line)
            if size >= UNIT_BYTES:
                yield group
                group, size = [], 0
    if group:
        yield group


def _parts(tokenizer: Tokenizer) -> tuple[str, SpecialTokens, dict[str, str], str]:
    """Arguments with which a worker recreates the tokenizer."""
    return (
        tokenizer.backend.to_str(),
        tokenizer.special,
        tokenizer.templates.sources,
        tokenizer.source,
    )


class LineEncoder:
    """Worker function: encodes lines to ids and masks."""

    def __init__(
        self,
        backend: str,
        special: SpecialTokens,
        templates: dict[str, str],
        source: str,
        longest: int | None,
    ) -> None:
        import tokenizers

        backend_tokenizer = tokenizers.Tokenizer.from_str(backend)
        self._encoder = ChatEncoder(Tokenizer(backend_tokenizer, special, templates, source))
        self._longest = longest

    def __call__(self, unit: Lines) -> Encoded:
        encoded = [self._one(where, line) for where, line in unit]
        return Encoded(
            np.concatenate([chat.ids for chat in encoded]),
            np.concatenate([chat.learn for chat in encoded]),
            [len(chat.ids) for chat in encoded],
            sum(chat.open_ends for chat in encoded),
        )

    def _one(self, where: str, line: bytes) -> ChatTokens:
        chat = read_chat(line, where)
        try:
            encoded = self._encoder.encode(chat.messages, chat.tools)
        except CairnError as error:
            raise DataError(f"{where}: {error.message}", hint=error.hint) from None
        if self._longest is not None and len(encoded.ids) > self._longest:
            raise DataError(
                f"{where}: the chat has {len(encoded.ids)} tokens, more than {self._longest}",
                hint="shorten or remove it, or allow longer sequences",
            )
        return encoded
