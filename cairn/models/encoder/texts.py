"""Texts and pairs of texts as an encoder reads them, cut where that is asked for.

    [CLS] text [SEP]            one text
    [CLS] query [SEP] text [SEP]    a pair; `segment` is where the second text begins

Nothing is cut unless `most` says how many tokens there may be; the special tokens around a text always stay. Of a
single text either the first tokens stay or the last ones.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from cairn.core.errors import RequestError

if TYPE_CHECKING:
    from cairn.models.tokenizer import Tokenizer


Side = Literal["left", "right"]  # from which a text is cut


class TextIds(NamedTuple):
    ids: list[int]
    segment: int = 0  # where the second text of a pair begins; 0: there is one text


def encode_texts(
    tokenizer: "Tokenizer",
    texts: Sequence[str],
    most: int | None = None,
    special: bool = True,
    side: Side = "right",
) -> list[TextIds]:
    if most is None:
        return [TextIds(ids) for ids in tokenizer.encode_batch(texts, special)]
    encodings = tokenizer.backend.encode_batch(list(texts), add_special_tokens=special)
    cut = _cut if side == "right" else _cut_left
    return [TextIds(cut(one.ids, one.special_tokens_mask, most, 0)) for one in encodings]


def encode_pairs(
    tokenizer: "Tokenizer", pairs: Sequence[tuple[str, str]], most: int | None = None
) -> list[TextIds]:
    """Only the second text of a pair is cut."""
    encodings = tokenizer.backend.encode_batch([*pairs], add_special_tokens=True)
    encoded = []
    for encoding in encodings:
        second = next(
            (at for at, text in enumerate(encoding.sequence_ids) if text == 1), len(encoding.ids)
        )
        ids = _cut(encoding.ids, encoding.special_tokens_mask, most, second)
        segment = encoding.type_ids.index(1) if 1 in encoding.type_ids else 0
        encoded.append(TextIds(ids, segment))
    return encoded


def _cut(ids: list[int], special: Sequence[int], most: int | None, first: int) -> list[int]:
    """Truncate to at most `most` ids; those before `first` and the special tokens at the end are kept."""
    if most is None or len(ids) <= most:
        return ids
    tail = next((n for n, is_special in enumerate(reversed(special)) if not is_special), 0)
    room = most - tail
    if room < first:
        raise RequestError(
            f"the first text of a pair and the special tokens take {first + tail} tokens of {most}",
            hint="shorten the query, or allow more tokens",
        )
    return ids[:room] + ids[len(ids) - tail :]


def _cut_left(ids: list[int], special: Sequence[int], most: int, first: int) -> list[int]:
    """The same from the other end: the special tokens at the beginning stay."""
    return _cut(ids[::-1], special[::-1], most, first)[::-1]
