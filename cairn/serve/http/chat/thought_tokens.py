"""Count of reasoning tokens, for `reasoning_tokens` of the usage.

    <think> Hm , well . </think> Yes .                     4: those between the marks
    <|channel|> analysis <|message|> Hm . <|end|> ...      2

Runs on the event loop when an answer ends, so a long thought must not cost what a tokenizer takes for it: where the
marks are tokens of their own, only their places are looked up. Elsewhere the tokenizer reads the thought, or of a long
one the beginning, and counts the rest in proportion.
"""

from collections.abc import Sequence

from cairn.models.tokenizer import Tokenizer
from cairn.serve.http.chat.harmony import CHANNEL, CONSTRAIN, MARKS, MESSAGE, is_thought
from cairn.serve.http.chat.reasoning import CLOSE, OPEN

MOST_READ = 4096  # characters of a thought that the tokenizer reads: a few milliseconds


def thought_tokens(ids: Sequence[int], thought: str, tokenizer: Tokenizer) -> int:
    """`ids`: all tokens of one answer; `thought`: what its reader took for thoughts."""
    if not thought:
        return 0
    opened, closed, message = map(tokenizer.backend.token_to_id, (OPEN, CLOSE, MESSAGE))
    if closed is not None and (closed in ids or opened in ids):
        return _between_marks(ids, opened, closed, tokenizer)
    if message is not None and message in ids:
        return _in_channels(ids, message, tokenizer)
    read = thought[:MOST_READ]
    count = len(tokenizer.encode(read, special=False)) * len(thought) / len(read)
    return min(round(count), len(ids))


def _between_marks(
    ids: Sequence[int], opened: int | None, closed: int, tokenizer: Tokenizer
) -> int:
    end = ids.index(closed) if closed in ids else len(ids)
    begin = ids.index(opened) + 1 if opened in ids[:end] else 0
    cut_off = end == len(ids) and ids[-1] in tokenizer.special_ids  # by an end of text
    return end - begin - cut_off


def _in_channels(ids: Sequence[int], message: int, tokenizer: Tokenizer) -> int:
    marks = {tokenizer.backend.token_to_id(mark) for mark in MARKS}
    header_marks = {tokenizer.backend.token_to_id(mark) for mark in (CHANNEL, CONSTRAIN)}
    count, inside, header = 0, False, list[int]()
    for id in ids:
        if id == message:
            inside, header = is_thought(tokenizer.decode(header, skip_special=False)), []
        elif id in marks:
            inside, header = False, [*header, id] if id in header_marks else []
        elif inside:
            count += 1
        else:
            header.append(id)
    return count
