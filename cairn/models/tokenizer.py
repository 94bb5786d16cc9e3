"""Tokenizer of a model: text to token ids and back.

Knows nothing about files, GGUF or Jinja: those are `tokenizer_folder`, `gguf.tokenizer` and `chat_template`. The
ids are those of the tokenizer.json (or the GGUF vocabulary) as it is written. The `tokenizers` library does
the work; no torch.

    messages -chat-> text -encode-> ids ... the model ... ids -stream().push-> text, a piece at a time
"""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cairn.core.errors import RequestError, TokenizerError
from cairn.models.chat_template import ChatTemplates
from cairn.models.incremental_decode import IncrementalDecoder, PieceTables
from cairn.models.vision.conversation import with_parts

if TYPE_CHECKING:
    import tokenizers

Message = Mapping[str, Any]
ToolSchema = Mapping[str, Any]
# Characters or ids: more go through the library's batch calls, which release the interpreter lock while they work. A
# server's event loop would otherwise stop for a second for 300 kB, in whichever thread they are tokenized.
LONG_TEXT = 8192


class SpecialTokens(msgspec.Struct, frozen=True):
    """The tokens that mean something other than their text."""

    named: dict[str, str] = {}  # "bos_token": "<s>", ...: the variables a chat template sees
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()  # each of these ends an answer
    pad_id: int | None = None


class Tokenizer:
    """Text to ids and back. Safe to share between threads."""

    reads_parts = False  # the chat template iterates over the parts of a content, as those of models that see do

    def __init__(
        self,
        backend: "tokenizers.Tokenizer",
        special: SpecialTokens,
        templates: Mapping[str, str] | None = None,
        source: str = "this tokenizer",
    ) -> None:
        backend.no_truncation()  # a length limit is the engine's to report, never a silent cut
        backend.no_padding()
        self.backend = backend
        self.special = special
        self.source = source  # where it came from, for messages
        self.templates = ChatTemplates(templates or {}, special.named, source)
        self._pieces = PieceTables(backend)
        self._special_ids = frozenset(
            id for id, token in backend.get_added_tokens_decoder().items() if token.special
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """Number of token ids. A model's embedding may have more rows as padding."""
        return self.backend.get_vocab_size()

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary spells it: at least as many as its text has."""
        return max(map(len, self.backend.get_vocab()), default=1)

    @property
    def bos_id(self) -> int | None:
        return self.special.bos_id

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.special.eos_ids

    @property
    def pad_id(self) -> int | None:
        return self.special.pad_id

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids that `skip_special` leaves out of the text."""
        return self._special_ids

    def token(self, id: int) -> str:
        """A token as the vocabulary spells it: 'Ġthe' or '▁the', not ' the'."""
        token = self.backend.id_to_token(id) if 0 <= id < 1 << 32 else None
        if token is None:
            raise TokenizerError(
                f"{self.source} has no token with id {id}; it has {self.vocab_size} tokens"
            )
        return token

    def piece(self, id: int) -> str | bytes | None:
        """Text that a token adds inside a text: ' the' for '▁the', where `decode` gives 'the'.

        Bytes: it is a part of a character. None: no token has this id.
        """
        return self._pieces.piece(id) if 0 <= id < 1 << 32 else None

    def id(self, token: str) -> int:
        id = self.backend.token_to_id(token)
        if id is None:
            raise TokenizerError(
                f"{self.source} has no token {token!r}",
                hint="tokens are spelled as in the vocabulary, with Ġ or ▁ for a space; encode() takes plain text",
            )
        return id

    @property
    def decodes_by_piece(self) -> bool:
        """Does `stream` give text out before all ids are known?"""
        return self._pieces.known

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of `text`; with `special`, also the tokens that the model expects around it, such as BOS."""
        if isinstance(text, str) and len(text) > LONG_TEXT:
            return self.encode_batch([text], special)[0]
        try:
            return self.backend.encode(text, add_special_tokens=special).ids
        except TypeError as error:
            raise _not_text(text) from error

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        texts = list(texts)
        try:
            encodings = self.backend.encode_batch_fast(texts, add_special_tokens=special)
        except TypeError as error:
            raise _not_text(*texts) from error
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Ids beyond the vocabulary, which a padded model can emit, have no text."""
        try:
            if len(ids) > LONG_TEXT:
                return self.backend.decode_batch([ids], skip_special_tokens=skip_special)[0]
            return self.backend.decode(ids, skip_special_tokens=skip_special)
        except (OverflowError, TypeError) as error:
            raise RequestError(
                f"token ids are whole numbers from 0 to 2^32 - 1: {error}"
            ) from error

    def stream(self, skip_special: bool = True, after: Sequence[int] = ()) -> IncrementalDecoder:
        """Decodes ids one at a time: the pieces joined are `decode` of all of them.

        `after` are ids whose text is known, such as the prompt, and never comes out. A word that follows them keeps
        the space that the first word of a text would lose, and a character that they began can become whole.
        """
        return self._pieces.decoder(skip_special, after)

    def use_template(self, source: str) -> None:
        """Replace the model's chat template."""
        self.templates = self.templates.replaced(source)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """The conversation as the model was taught to read it, ending where the assistant begins."""
        conversation = with_parts(messages) if self.reads_parts else messages
        return self.templates.render(conversation, tools, add_generation_prompt, **template_kwargs)

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSchema] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Ids of `chat`. The template writes BOS itself where the model wants one, so none is added."""
        text = self.chat(messages, tools, add_generation_prompt, **template_kwargs)
        return self.encode(text, special=False)


def _not_text(*texts: object) -> RequestError:
    """Error for the first text that the library rejects."""
    for text in texts:
        if not isinstance(text, str):
            return RequestError(f"a prompt is text, not {type(text).__name__}")
        for position, char in enumerate(text):
            if "\ud800" <= char <= "\udfff":
                return RequestError(
                    f"the text has half of a surrogate pair (U+{ord(char):04X}) at character {position}",
                    hint="send characters beyond U+FFFF whole: as UTF-8, or in JSON as both halves of the pair",
                )
    return RequestError("the tokenizer refuses this text")
