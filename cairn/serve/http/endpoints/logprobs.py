"""Log-probabilities as clients read them.

OpenAI's chat and llama.cpp's server list them by token, OpenAI's completions in four parallel lists.
"""

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import Logprob, readable_prompt, spell
from cairn.serve.http.protocol.answers import (
    CompletionLogprobs,
    PromptLogprob,
    TokenLogprob,
    TopLogprob,
)
from cairn.serve.job import Job

LEAST = -9999.0  # JSON has no infinity
Found = Mapping[int, Logprob]


def chat_logprobs(
    tokens: Sequence[int],
    entries: Sequence[Found],
    top: int,
    tokenizer: Tokenizer | None,
    as_ids: bool = False,
) -> list[TokenLogprob]:
    """`as_ids`: tokens are named by their ids."""
    return [
        TokenLogprob(
            token=text_of(token, by_id[token], as_ids),
            logprob=finite(by_id[token].logprob),
            bytes=bytes_of_token(token, by_id[token], tokenizer),
            top_logprobs=[
                TopLogprob(
                    token=text_of(id, one, as_ids),
                    logprob=finite(one.logprob),
                    bytes=bytes_of_token(id, one, tokenizer),
                )
                for id, one in _likeliest(by_id, top)
            ],
        )
        for token, by_id in zip(tokens, entries, strict=True)
    ]


def llama_logprobs(
    tokens: Sequence[int], entries: Sequence[Found], top: int, tokenizer: Tokenizer | None
) -> list[dict[str, Any]]:
    """Log probabilities in llama.cpp's format: that of the chat API, with ids."""
    rows = []
    for token, by_id in zip(tokens, entries, strict=True):
        likeliest = [_llama_row(id, one, tokenizer) for id, one in _likeliest(by_id, top)]
        rows.append(_llama_row(token, by_id[token], tokenizer) | {"top_logprobs": likeliest})
    return rows


def _llama_row(id: int, one: Logprob, tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "id": id,
        "token": text_of(id, one),
        "bytes": bytes_of_token(id, one, tokenizer),
        "logprob": finite(one.logprob),
    }


class TextOffsets:
    """Character offsets of tokens in a text. A partial character has the offset of the character."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        start: int = 0,
        after: Sequence[int] = (),
        skip_special: bool = False,
        hidden: int = 0,
    ) -> None:
        """`start`: characters before the first token; `after`: the ids before it; `hidden`: first ids without text."""
        self.at = start
        self._opens = not after  # the first token of a text may lose its space
        self._hidden = hidden
        self._held = bytearray()  # characters in bytes that the decoder has not given out yet
        self._tokenizer = tokenizer
        self._decoder = None
        if tokenizer is not None and tokenizer.decodes_by_piece:
            self._decoder = tokenizer.stream(skip_special, after=after)

    def place(self, token: int, text: str) -> tuple[int, str]:
        """Offset of this token, and its text."""
        at = self.at + len(codecs.utf_8_decode(self._held, "replace", False)[0])
        if self._hidden:
            self._hidden -= 1
            return at, text
        added = text if self._decoder is None else self._decoder.push(token)
        self.at += len(added)
        piece = None if self._tokenizer is None else self._tokenizer.piece(token)
        if added:
            self._held.clear()
        elif isinstance(piece, bytes):
            self._held += piece
        if self._opens and added:
            self._opens = False
            text = added if text.endswith(added) else text
        return at, text


def completion_logprobs(
    tokens: Sequence[int],
    entries: Sequence[Found | None],
    top: int,
    offsets: TextOffsets,
    tokenizer: Tokenizer | None,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Log probabilities of a completion. None entries are tokens without context; `as_ids` names tokens by id."""
    logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, by_id in zip(tokens, entries, strict=True):
        chosen = by_id[token] if by_id is not None else None
        text = text_of(token, chosen)
        if chosen is None and tokenizer is not None:
            text = spell(tokenizer.piece(token))
        at, text = offsets.place(token, text)
        logprobs.tokens.append(text_of(token, None) if as_ids else text)
        logprobs.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
        logprobs.top_logprobs.append(None if by_id is None else _row(by_id, token, top, as_ids))
        logprobs.text_offset.append(at)
    return logprobs


def _row(by_id: Found, token: int, top: int, as_ids: bool) -> dict[str, float]:
    """Log probabilities by text. If two ids have the same text, the more likely one gets it and the other its id."""
    row: dict[str, float] = {}
    for id, one in dict([*_likeliest(by_id, top), (token, by_id[token])]).items():
        text = text_of(id, one, as_ids)
        row[text if text not in row else f"token_id:{id}"] = finite(one.logprob)
    return row


def prompt_rows(
    job: Job, top: int, tokenizer: Tokenizer | None
) -> list[dict[int, PromptLogprob] | None] | msgspec.UnsetType:
    """Log probabilities of each prompt token by id; UNSET if the prompt was not completely computed."""
    ids, entries = job.request.prompt, job.prompt_logprobs
    if entries is None and len(ids) > 1:
        return msgspec.UNSET
    rows: list[dict[int, PromptLogprob] | None] = []
    for token, by_id in zip(ids, readable_prompt(ids, entries or (), tokenizer), strict=True):
        named = {} if by_id is None else dict([*_likeliest(by_id, top), (token, by_id[token])])
        row = {
            id: PromptLogprob(finite(one.logprob), one.rank, one.decoded_token)
            for id, one in named.items()
        }
        rows.append(None if by_id is None else row)  # nothing comes before the first
    return rows


def text_of(token: int, one: Logprob | None, as_ids: bool = False) -> str:
    text = None if one is None or as_ids else one.decoded_token
    return f"token_id:{token}" if text is None else text


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def bytes_of_token(token: int, one: Logprob, tokenizer: Tokenizer | None) -> list[int] | None:
    """Bytes of a token, also of a partial character."""
    piece = None if tokenizer is None else tokenizer.piece(token)
    if piece is None:  # a row of the model beyond the vocabulary
        return None
    return list(piece if isinstance(piece, bytes) else piece.encode())


def _likeliest(by_id: Found, top: int) -> list[tuple[int, Logprob]]:
    ranked = [(id, one) for id, one in by_id.items() if one.rank is not None]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)[:top]
