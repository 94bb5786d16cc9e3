"""A chat as token ids, with exactly the assistant's tokens marked as to be learnt.

    text      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
    learn          0       0  0 0    0     0      0         0      0   1  1    1      0

The ids are those of `Tokenizer.encode_chat`, to the last one. A token is learnt when it begins within an answer; the
token that ends the turn is learnt too, or the model would never stop. A token that begins in the prompt and
reaches into the answer is not: no model could write half of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import processors

from cairn.core.errors import DataError
from cairn.models.tokenizer import Tokenizer
from cairn.train.data.chat_spans import Message, Rendered, render_with_spans

Offset = tuple[int, int]


class ChatTokens(NamedTuple):
    ids: np.ndarray  # int64
    learn: np.ndarray  # bool
    open_ends: int  # answers without an end-of-turn token: the template writes none


class ChatEncoder:
    """Encodes chats with one tokenizer. Makes a copy of its backend, to see offsets as they are."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.templates.choose(with_tools=False)  # refuses a model without a template at once
        self._tokenizer = tokenizer
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
        self._backend.encode_special_tokens = tokenizer.backend.encode_special_tokens
        # A post-processor would cut spaces off the offsets, and adds tokens that a template writes itself.
        self._backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self._added = frozenset(self._backend.get_added_tokens_decoder()) | {*tokenizer.eos_ids}

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> ChatTokens:
        return self.encode_rendered(render_with_spans(self._tokenizer.templates, messages, tools))

    def encode_rendered(self, rendered: Rendered) -> ChatTokens:
        if not rendered.spans:
            raise DataError(
                "the assistant says nothing that is to be learnt in this chat",
                hint="a chat for training has at least one message with the role assistant",
            )
        encoding = self._backend.encode(rendered.text, add_special_tokens=False)
        ids, offsets = np.asarray(encoding.ids, np.int64), encoding.offsets
        starts = np.asarray([offset[0] for offset in offsets], np.int64)
        learn, open_ends = np.zeros(len(ids), bool), 0
        for span in rendered.spans:
            first, behind = np.searchsorted(starts, [span.start, span.stop], side="left")
            end = (
                self._last_added(encoding.ids, int(first), int(behind))
                if span.closed
                else self._end_of_turn(encoding.ids, offsets, rendered.text, int(behind))
            )
            open_ends += end is None
            learn[first : behind if end is None else end + 1] = True
        return ChatTokens(ids, learn, open_ends)

    def _last_added(self, ids: Sequence[int], first: int, behind: int) -> int | None:
        return next((at for at in range(behind - 1, first - 1, -1) if ids[at] in self._added), None)

    def _end_of_turn(
        self, ids: Sequence[int], offsets: Sequence[Offset], text: str, behind: int
    ) -> int | None:
        """The token that ends the turn: an added token, with nothing but spaces between it and the answer."""
        for at in range(behind, len(ids)):
            if ids[at] in self._added:
                return at
            if text[slice(*offsets[at])].strip():
                return None
        return None
