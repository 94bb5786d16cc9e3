"""A list in pages, as OpenAI's clients go through it: `limit` items behind the one whose id is `after`."""

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import parse_qs

from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.call import Call

T = TypeVar("T")
MOST_DIGITS = 9


def page_of(
    call: Call, items: Sequence[T], ids: Sequence[str], usual: int, most: int
) -> tuple[list[T], bool]:
    """What a request asks for, `usual` of them where it does not say; and is there more?"""
    query = parse_qs(call.scope["query_string"].decode("latin-1"))
    limit, after = query.get("limit", [str(usual)])[0], query.get("after", [""])[0]
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= MOST_DIGITS
    if not (is_number and 1 <= int(limit) <= most):
        said = f"limit is {limit[:40]!r}; it has to be a whole number from 1 to {most}"
        raise Refusal(400, said, param="limit")
    start = ids.index(after) + 1 if after in ids else 0
    end = start + int(limit)
    return list(items[start:end]), len(items) > end
