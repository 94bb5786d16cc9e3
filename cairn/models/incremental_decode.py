"""Incremental detokenisation of a stream of ids, without partial characters.

Whatever ids come, the pieces joined are what the `tokenizers` library decodes from all ids at once: the rules of
its decoders, applied from left to right. A token costs one look-up. Held back are only the bytes of an unfinished
character; with byte-fallback tokens (<0xE2>) the whole run of them, since one bad byte would spoil it as a whole.
It knows nothing about requests, stop strings or sockets.

    id -> token -> "text"                             given out at once
                -> bytes of part of a character       held in `run` until the character is whole
"""

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import tokenizers

UNDECODABLE = "\N{REPLACEMENT CHARACTER}"
CONTEXT_TOKENS = 16  # of the known ids: the last ones tell how the text continues
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder(Protocol):
    """Incremental decoder of an answer."""

    def push(self, id: int) -> str:
        """The text that this id makes certain; may be empty."""
        ...

    def flush(self) -> str:
        """Return the remaining text at the end; incomplete characters become U+FFFD."""
        ...


class DecoderRules(msgspec.Struct, frozen=True):
    """Rules of a tokenizer's decoder, for the decoder types of language models."""

    byte_level: bool = False  # tokens spell bytes in GPT-2's alphabet; the text is their UTF-8
    byte_fallback: bool = False  # <0xE2> is a byte; a run of bytes is UTF-8, or one U+FFFD each
    replace: tuple[tuple[str, str], ...] = ()  # in each token, such as ("▁", " ")
    drop_in_first: str = ""  # Metaspace: this character has no text in the first token
    strip: str = ""  # this character is taken from the start of the text ...
    strip_count: int = 0  # ... at most so many times


def rules_of(decoder: Mapping[str, object] | None) -> DecoderRules | None:
    """The rules of a decoder in tokenizer.json's notation; None for a kind that needs all ids at once."""
    match _flat(decoder):
        case [{"type": "ByteLevel"}]:
            return DecoderRules(byte_level=True)
        case [{"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}]:
            return DecoderRules(
                replace=((mark, " "),), drop_in_first="" if scheme == "never" else mark
            )
        case [*steps, {"type": "ByteFallback"}, {"type": "Fuse"}]:
            return _byte_fallback_rules(steps)
        case [
            *steps,
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": str(char), "start": int(count), "stop": 0},
        ]:
            return _byte_fallback_rules(steps, char, count)
    return None


def _flat(decoder: Mapping[str, object] | None) -> list[Mapping[str, object]]:
    match decoder:
        case None:
            return []
        case {"type": "Sequence", "decoders": list(parts)}:
            return [step for part in parts for step in _flat(part)]
    return [decoder]


def _byte_fallback_rules(
    steps: list[Mapping[str, object]], strip: str = "", count: int = 0
) -> DecoderRules | None:
    replace = []
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": dict(pattern), "content": str(new)} if (
                "String" in pattern
            ):
                replace.append((pattern["String"], new))
            case _:
                return None
    return DecoderRules(byte_fallback=True, replace=tuple(replace), strip=strip, strip_count=count)


class PieceTables:
    """Text piece of each id, filled on demand and shared by all streams of a tokenizer."""

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        self._backend = backend
        state = backend.decoder.__getstate__() if backend.decoder is not None else b"null"
        self._rules = rules_of(json.loads(state))
        self._tables: dict[bool, Pieces] = {}

    @property
    def known(self) -> bool:
        """Are there rules for pieces? Else a text is certain when all ids are known."""
        return self._rules is not None

    def decoder(self, skip_special: bool, after: Sequence[int] = ()) -> IncrementalDecoder:
        """`after`: the ids in front, whose text is known."""
        if self._rules is None:
            return HeldDecoder(self._backend, skip_special, after)
        return PieceDecoder(self._table(self._rules, skip_special), self._rules, after)

    def piece(self, id: int) -> str | bytes | None:
        """Text that an id adds inside a text; None for ids without a token."""
        if self._rules is not None:
            return self._table(self._rules, skip_special=False)[id]
        exists = self._backend.id_to_token(id) is not None
        return self._backend.decode([id], skip_special_tokens=False) if exists else None

    def _table(self, rules: DecoderRules, skip_special: bool) -> "Pieces":
        if skip_special not in self._tables:
            self._tables[skip_special] = Pieces(self._backend, rules, skip_special)
        return self._tables[skip_special]


class Pieces(dict[int, str | bytes | None]):
    """id -> its text | its bytes, if they are no text on their own | None, if it leaves no trace at all."""

    def __init__(
        self, backend: "tokenizers.Tokenizer", rules: DecoderRules, skip_special: bool
    ) -> None:
        super().__init__()
        self._backend = backend
        self._rules = rules
        added = backend.get_added_tokens_decoder().values()
        self._skipped = (
            {token.content for token in added if token.special} if skip_special else set()
        )

    def __missing__(self, id: int) -> str | bytes | None:
        token = self._backend.id_to_token(id)
        piece = None if token is None or token in self._skipped else piece_of(token, self._rules)
        self[id] = piece
        return piece

    def first(self, id: int) -> str | bytes | None:
        """The piece of an id that opens the text, for decoders that treat the first token differently."""
        piece, token, drop = self[id], self._backend.id_to_token(id), self._rules.drop_in_first
        return piece if piece is None or token is None or not drop else token.replace(drop, "")


def piece_of(token: str, rules: DecoderRules) -> str | bytes:
    if rules.byte_level:
        spelled = bytes_of(token)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return spelled
    for old, new in rules.replace:
        token = token.replace(old, new)
    if rules.byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
        return bytes.fromhex(byte[1])
    return token


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the other 68 as U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def bytes_of(token: str) -> bytes:
    """The bytes a token spells; one that strays from the alphabet, such as <｜end｜>, stands for itself."""
    try:
        return bytes(BYTE_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


class PieceDecoder:
    """Joins pieces. `run` holds bytes whose text depends on what comes next."""

    def __init__(self, pieces: Pieces, rules: DecoderRules, after: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._run = bytearray()
        self._known = (
            ""  # what the run says if the character that `after` began never becomes whole
        )
        self._whole_runs = (
            rules.byte_fallback
        )  # a run is decoded once it has ended, not as it grows
        self._strip = rules.strip
        self._strip_left = rules.strip_count
        self._first = bool(rules.drop_in_first)
        for id in after[-CONTEXT_TOKENS:]:
            self.push(id)
        if len(after) > CONTEXT_TOKENS:
            self._strip_left, self._first = 0, False  # the text has begun
        if self._run:
            del self._run[: codecs.utf_8_decode(self._run, "replace", False)[1]]
            self._known = self._decoded_run()

    def push(self, id: int) -> str:
        piece = self._pieces.first(id) if self._first else self._pieces[id]
        if isinstance(piece, str):
            self._first = False
            text = self._end_run() + piece if self._run else piece
            return self._without_lead(text) if self._strip_left else text
        if piece is None:
            return ""
        self._first = False
        return self._without_lead(self._extend_run(piece))

    def flush(self) -> str:
        return self._without_lead(self._end_run())

    def _extend_run(self, more: bytes) -> str:
        self._run += more
        if self._whole_runs:
            return ""
        text, used = codecs.utf_8_decode(self._run, "replace", False)
        del self._run[:used]
        return self._unknown(text) if text else ""

    def _end_run(self) -> str:
        text = self._unknown(self._decoded_run())
        self._run.clear()
        return text

    def _decoded_run(self) -> str:
        if not self._whole_runs:
            return self._run.decode(errors="replace")  # one mark for each piece of a character
        try:
            return self._run.decode()
        except UnicodeDecodeError:
            return UNDECODABLE * len(self._run)  # after byte fallback: one mark for each byte

    def _unknown(self, text: str) -> str:
        """The text of a run without the marks of bytes that came before the answer."""
        known, self._known = self._known, ""
        return text.removeprefix(known)

    def _without_lead(self, text: str) -> str:
        """`text` less what the decoder strips from the start of the whole text."""
        while self._strip_left and text:
            if text[0] != self._strip:
                self._strip_left = 0
            else:
                text = text[1:]
                self._strip_left -= 1
        return text


class HeldDecoder:
    """Decoder whose text is certain only when all ids are known: it returns everything at the end."""

    def __init__(
        self, backend: "tokenizers.Tokenizer", skip_special: bool, after: Sequence[int] = ()
    ) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._after = list(after[-CONTEXT_TOKENS:])
        self._ids: list[int] = []

    def push(self, id: int) -> str:
        self._ids.append(id)
        return ""

    def flush(self) -> str:
        known, whole = self._decode(self._after), self._decode(self._after + self._ids)
        self._ids = []
        pairs = enumerate(zip(known, whole, strict=False))
        return whole[next((at for at, (old, new) in pairs if old != new), len(known)) :]

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=self._skip_special)
