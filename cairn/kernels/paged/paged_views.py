"""A cache of pages as a matrix with one row for each token, so that a tile of keys is a block of it.

    tokens keep their heads side by side   row = page * page_rows + token,                      column = head * stride
    heads keep their tokens together       row = page * page_rows + head * head_rows + token,   column = 0

Descriptors (TMA) want such a view; kernels that load by pointers need none.
"""

from typing import NamedTuple

from torch import Tensor


class View(NamedTuple):
    page_rows: int = 0
    head_rows: int = 0
    head_columns: int = 0
    rows: int = 0
    columns: int = 0


def matrix_view(cache: Tensor) -> View | None:
    """Matrix view of a cache, or None: descriptors need strides of 16 bytes and widths that are powers of 2."""
    pages, _, kv_heads, columns = cache.shape
    page, token, head, _ = cache.stride()
    steps = 16 // cache.element_size()
    if (
        token == 0
        or page % token
        or token % steps
        or cache.data_ptr() % 16
        or columns & (columns - 1)
    ):
        return None
    if (head + columns <= token or kv_heads == 1) and head % steps == 0:
        return View(
            page // token, 0, head, pages * (page // token), (kv_heads - 1) * head + columns
        )
    if head % token == 0:
        return View(page // token, head // token, 0, pages * (page // token), columns)
    return None
