"""The kernels of `step_inputs`: a program for each sequence and cache group, and one that keeps what was sampled."""

import triton
import triton.language as tl

from cairn.kernels.dependent import begin


@triton.jit
def _page_at(index, row_table, new, first, mask, GROUPS: tl.constexpr):
    """A page of the sequence: a new one, or one that the row's table has. Never read from what is written here."""
    is_new = index >= first
    of_table = tl.load(row_table + index, mask=mask & ~is_new, other=0)
    added = tl.load(new + (index - first) * GROUPS, mask=mask & is_new, other=0)
    return tl.where(is_new, added, of_table)


@triton.jit
def _inputs_kernel(
    rows, starts, bounds, first_pages, page_bounds, pages, given, table, last_tokens, kept_lengths,
    tokens, positions, slots, lengths, tables, table_stride, tables_stride, table_group, slots_group, tables_group,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for each sequence and cache group; what groups have in common each of them writes."""
    begin(OVERLAP)
    b = tl.program_id(0)
    group = tl.program_id(1)
    slots += group * slots_group
    tables += group.to(tl.int64) * tables_group
    row = tl.load(rows + b).to(tl.int64)
    opens = tl.load(bounds + b)
    count = tl.load(bounds + b + 1) - opens
    lane = tl.arange(0, BLOCK)
    if row < 0:
        tl.store(lengths + b, 0)
        for i in tl.range(0, count, BLOCK, num_stages=1):
            mask = i + lane < count
            at = opens + i + lane
            tl.store(tokens + at, tl.zeros([BLOCK], tl.int32), mask=mask)
            tl.store(positions + at, tl.zeros([BLOCK], tl.int32), mask=mask)
            tl.store(slots + at, tl.full([BLOCK], -1, tl.int32), mask=mask)
        return
    start = tl.load(starts + b)
    if start < 0:
        start = tl.load(kept_lengths + row)
    first = tl.load(first_pages + b)
    new = pages + tl.load(page_bounds + b) * GROUPS + group
    known = first + tl.load(page_bounds + b + 1) - tl.load(page_bounds + b)
    row_table = table + group.to(tl.int64) * table_group + row * table_stride
    tl.store(lengths + b, start + count)
    last = tl.load(last_tokens + row)
    for i in tl.range(0, count, BLOCK, num_stages=1):
        mask = i + lane < count
        at = opens + i + lane
        token = tl.load(given + at, mask=mask, other=0)
        position = start + i + lane
        page = _page_at(position // PAGE, row_table, new, first, mask, GROUPS)
        tl.store(tokens + at, tl.where(token == -1, last, token), mask=mask)
        tl.store(positions + at, position, mask=mask)
        tl.store(slots + at, page * PAGE + position % PAGE, mask=mask)
    for i in tl.range(0, known, BLOCK, num_stages=1):
        index = i + lane
        mask = index < known
        page = _page_at(index, row_table, new, first, mask, GROUPS)
        tl.store(tables + b.to(tl.int64) * tables_stride + index, page, mask=mask)
        tl.store(row_table + index, page, mask=mask & (index >= first))


@triton.jit
def _keep_kernel(last_tokens, tokens, rows, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + at, mask=at < count, other=-1).to(tl.int64)
    mask = (at < count) & (row >= 0)
    tl.store(last_tokens + row, tl.load(tokens + at, mask=mask, other=0), mask=mask)
