"""A list in pages, as OpenAI's clients go through it: `limit` items behind the one whose id is `after`."""

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import parse_qs

from cairn.serve.http.protocol.refusal import Refusal
from cairn.serve.http.server.call import Call

T = TypeVar("T")
MOST_DIGITS = 9


def query_of(call: Call) -> dict[str, str]:
    """The parameters behind the path; of one that is given several times, the first."""
    fields = parse_qs(call.scope["query_string"].decode("latin-1"))
    return {name: values[0] for name, values in fields.items()}


def in_order(call: Call, newest_first: list[T]) -> list[T]:
    """Sort by the query's `order`, newest first by default."""
    order = query_of(call).get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refusal(400, f"order is {order[:40]!r}; it has to be asc or desc", param="order")
    return newest_first if order == "desc" else newest_first[::-1]


def page_of(
    call: Call, items: Sequence[T], ids: Sequence[str], usual: int, most: int
) -> tuple[list[T], bool]:
    """The requested page of items (`usual` by default), and whether more follow."""
    query = query_of(call)
    limit, after = query.get("limit", str(usual)), query.get("after", "")
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= MOST_DIGITS
    if not (is_number and 1 <= int(limit) <= most):
        message = f"limit is {limit[:40]!r}; it has to be a whole number from 1 to {most}"
        raise Refusal(400, message, param="limit")
    start = ids.index(after) + 1 if after in ids else 0
    end = start + int(limit)
    return list(items[start:end]), len(items) > end
