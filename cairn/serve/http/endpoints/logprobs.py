"""Log-probabilities as OpenAI's two interfaces spell them: by token in chat, in four parallel lists in completions."""

import re
from collections.abc import Mapping, Sequence

from cairn.core.errors import TokenizerError
from cairn.models.incremental_decode import BYTE_ALPHABET, UNDECODABLE, bytes_of
from cairn.models.tokenizer import Tokenizer
from cairn.serve.answer import Logprob
from cairn.serve.http.protocol.answers import CompletionLogprobs, TokenLogprob, TopLogprob

LEAST = -9999.0  # JSON has no infinity
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
Found = Mapping[int, Logprob]


def chat_logprobs(
    tokens: Sequence[int], found: Sequence[Found], top: int, tokenizer: Tokenizer | None
) -> list[TokenLogprob]:
    return [
        TokenLogprob(
            token=text_of(token, by_id[token]),
            logprob=finite(by_id[token].logprob),
            bytes=bytes_of_token(token, by_id[token], tokenizer),
            top_logprobs=[
                TopLogprob(
                    token=text_of(id, one), logprob=finite(one.logprob), bytes=bytes_of_token(id, one, tokenizer)
                )
                for id, one in _likeliest(by_id, top)
            ],
        )
        for token, by_id in zip(tokens, found, strict=True)
    ]  # fmt: skip


def completion_logprobs(
    tokens: Sequence[int],
    found: Sequence[Found | None],
    top: int,
    offset: int,
    tokenizer: Tokenizer | None,
) -> CompletionLogprobs:
    """`offset`: characters of the text before the first of these tokens. None: nothing comes before that token."""
    made = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token, by_id in zip(tokens, found, strict=True):
        chosen = by_id[token] if by_id is not None else None
        text = text_of(token, chosen)
        if chosen is None and tokenizer is not None:
            text = tokenizer.decode([token], skip_special=False)
        made.tokens.append(text)
        made.token_logprobs.append(None if chosen is None else finite(chosen.logprob))
        made.top_logprobs.append(None if by_id is None else _row(by_id, token, top))
        made.text_offset.append(offset)
        offset += len(text)
    return made


def _row(by_id: Found, token: int, top: int) -> dict[str, float]:
    """By text. Two ids may have the same one; the likelier comes first, and stays."""
    row: dict[str, float] = {}
    for id, one in [*_likeliest(by_id, top), (token, by_id[token])]:
        row.setdefault(text_of(id, one), finite(one.logprob))
    return row


def text_of(token: int, one: Logprob | None) -> str:
    text = None if one is None else one.decoded_token
    return f"token_id:{token}" if text is None else text


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


def bytes_of_token(token: int, one: Logprob, tokenizer: Tokenizer | None) -> list[int] | None:
    """Of a character that several tokens share, the bytes of this one."""
    text = one.decoded_token
    if text is None or tokenizer is None:
        return None
    if UNDECODABLE not in text:
        return list(text.encode())
    try:
        spelled = tokenizer.token(token)
    except TokenizerError:  # a row of the model beyond the vocabulary
        return None
    if byte := _BYTE_TOKEN.fullmatch(spelled):
        return list(bytes.fromhex(byte[1]))
    return list(bytes_of(spelled)) if all(char in BYTE_ALPHABET for char in spelled) else None


def _likeliest(by_id: Found, top: int) -> list[tuple[int, Logprob]]:
    ranked = [(id, one) for id, one in by_id.items() if one.rank is not None]
    return sorted(ranked, key=lambda pair: pair[1].rank or 0)[:top]
