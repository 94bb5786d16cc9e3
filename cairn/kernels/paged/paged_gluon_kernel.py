# pyrefly: ignore-errors
"""Prefill over pages in Gluon for sm_90: a warp that copies pages, two warpgroups that compute.

    copying warp     looks pages up and copies them by TMA, each into its place of a block of 128 keys
    warpgroups 0, 1  64 rows each (queries x heads of a group): scores of block j, and behind them weights x values of
                     block j - 1; while those run, the softmax of block j

One program computes one tile of 128 rows, from the diagonal back to the first keys. A block lies in shared memory as
columns 0-63 of all its keys, then 64-127: a page is D / 64 boxes of 64 columns, and the block looks like one that came
whole. Tiles are found as in the Triton kernel, by a search in the query bounds; the last ones of a sequence go first.

Takes 16-bit numbers, D 64 or 128, groups that divide 64, sinks; no window and no soft-cap. Weights of 0 meet whatever a
page holds behind the end of its sequence: the cache must be finite everywhere, so allocate it with zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from cairn.kernels.attention.attention_rings import Ring, barriers

LOG2_E = gl.constexpr(1.4426950408889634)
LN_2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two
HALF = gl.constexpr(64)  # rows of a warpgroup
BLOCK = gl.constexpr(128)  # keys
BOX = gl.constexpr(64)  # columns of a copy: 128 bytes, the widest swizzle


@aggregate
class Shared:
    q: Ring  # both halves of the rows, one after the other
    k: Ring
    v: Ring
    turn: gl.shared_memory_descriptor  # barriers: whose turn it is to issue products

    @gluon.constexpr_function
    def __init__(self, q, k, v, turn):
        self.q, self.k, self.v, self.turn = q, k, v, turn


@aggregate
class Tile:
    start: gl.tensor  # first query row of the sequence
    queries: gl.tensor
    first_query: gl.tensor
    ahead: gl.tensor  # cached tokens before its first query
    blocks: gl.tensor  # of keys that it sees, the last perhaps in part
    limit: gl.tensor  # keys that it sees
    head: gl.tensor  # of keys

    @gluon.constexpr_function
    def __init__(self, start, queries, first_query, ahead, blocks, limit, head):
        self.start, self.queries, self.first_query = start, queries, first_query
        self.ahead, self.blocks, self.limit, self.head = ahead, blocks, limit, head


@gluon.jit
def _copy_block(table, block, limit, view, ring, step, view_row, view_column, page_rows, D: gl.constexpr,
                PAGE: gl.constexpr, BOX_ROWS: gl.constexpr):  # fmt: skip
    """The pages of one block, each in boxes of 64 columns."""
    PIECES: gl.constexpr = BLOCK // BOX_ROWS
    boxes = ring.at(step)._reinterpret(
        view.dtype, [PIECES * (D // BOX), BOX_ROWS, BOX], view.layout
    )
    ring.begin(step, BLOCK * D * 2)
    pieces = PIECES + (limit < 0).to(
        gl.int32
    )  # a number that the compiler does not know: unrolled, it would spill
    for piece in range(pieces):
        token = block * BLOCK + piece * BOX_ROWS
        page = gl.load(table + token // PAGE, mask=token < limit, other=0)
        row = page * page_rows + view_row + token % PAGE
        for part in gl.static_range(D // BOX):
            box = boxes.index(part * PIECES + piece)
            tma.async_copy_global_to_shared(
                view, [row, view_column + part * BOX], ring.filled(step), box
            )


@gluon.jit
def _copy(q_view, k_view, v_view, table, shared, tile, view_row, view_column, page_rows, GROUP: gl.constexpr,
          D: gl.constexpr, PAGE: gl.constexpr, BOX_ROWS: gl.constexpr):  # fmt: skip
    for half in gl.static_range(2):
        shared.q.begin(half, HALF * D * 2)
        token = tile.start + tile.first_query + half * (HALF // GROUP)
        at = [token, tile.head * GROUP, 0]
        tma.async_copy_global_to_shared(q_view, at, shared.q.filled(half), shared.q.at(half))
    for step in range(tile.blocks):
        block = tile.blocks - 1 - step
        _copy_block(table, block, tile.limit, k_view, shared.k, step, view_row, view_column, page_rows, D, PAGE,
                    BOX_ROWS)  # fmt: skip
        _copy_block(table, block, tile.limit, v_view, shared.v, step, view_row, view_column, page_rows, D, PAGE,
                    BOX_ROWS)  # fmt: skip


@gluon.jit
def _take_turn(shared, turns, ME: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        mbarrier.wait(shared.turn.index(ME), turns % 2 ^ (1 - ME))


@gluon.jit
def _pass_turn(shared, turns, ME: gl.constexpr, PING_PONG: gl.constexpr):
    if PING_PONG:
        mbarrier.arrive(shared.turn.index(1 - ME), count=1)
    return turns + 1


@gluon.jit
def _softmax(scores, top, total, scale_log2, position, key0, MASK: gl.constexpr):
    """Weights of a block, the running maximum and sum, and by how much all before has to shrink."""
    layout: gl.constexpr = scores.type.layout
    if MASK:
        # Scaled before the mask. A row may see nothing of its first block, so that its maximum is NOTHING; were it
        # scaled afterwards, the compiler would make one multiply-add of `NOTHING * scale - top`, whose exact product
        # differs from the rounded one by 1e21: with a scale that rounds up (1/8, so 64 columns) the weight is infinite.
        keys = key0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
        scores = gl.where(keys[None, :] <= position[:, None], scores * scale_log2, NOTHING)
        new_top = gl.maximum(top, gl.max(scores, 1))
        weights = gl.exp2(scores - new_top[:, None])
    else:
        new_top = gl.maximum(top, gl.max(scores, 1) * scale_log2)
        weights = gl.exp2(scores * scale_log2 - new_top[:, None])
    shrink = gl.exp2(top - new_top)
    return weights, new_top, total * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _step(acc, weights, top, total, step, more, q, shared, position, key0, scale_log2, MASK: gl.constexpr,
          ME: gl.constexpr, PING_PONG: gl.constexpr):  # fmt: skip
    """Scores and softmax of this block; values of the one before. This block's keys have arrived already."""
    score_layout: gl.constexpr = position.type.layout.parent
    acc_layout: gl.constexpr = acc.type.layout
    weight_layout: gl.constexpr = weights.type.layout
    nothing = gl.zeros([HALF, BLOCK], gl.float32, score_layout)
    _take_turn(shared, step, ME, PING_PONG)
    scores = warpgroup_mma(
        q, shared.k.at(step).permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    shared.v.wait(step - 1)
    acc = warpgroup_mma(weights, shared.v.at(step - 1), acc, is_async=True)
    _pass_turn(shared, step, ME, PING_PONG)
    scores = warpgroup_mma_wait(1, (scores,))
    shared.k.release(step)
    exact, top, total, shrink = _softmax(scores, top, total, scale_log2, position, key0, MASK)
    # The spin loop of this wait is a boundary between basic blocks: without one, ptxas waits for the second product
    # before the softmax instead of after it.
    shared.k.wait(step + 1, more)
    acc, weights = warpgroup_mma_wait(0, (acc, weights))
    shared.v.release(step - 1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc_layout))[:, None]
    weights = gl.convert_layout(exact.to(weights.dtype), weight_layout)
    return acc, weights, top, total


@gluon.jit
def _compute(out, lse, sinks, shared, tile, scale_log2, out_token, out_head, HEADS: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, PING_PONG: gl.constexpr,
             ME: gl.constexpr):  # fmt: skip
    dtype: gl.constexpr = shared.q.memory.dtype
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    row = ME * HALF + gl.arange(0, HALF, layout=row_layout)
    query = tile.first_query + row // GROUP
    position = gl.minimum(tile.ahead + query, tile.limit - 1)
    heads = tile.head * GROUP + row % GROUP
    ours = query < tile.queries
    if SINKS:  # a key of value 0 that everyone sees
        top = gl.load(sinks + heads).to(gl.float32) * LOG2_E
        total = gl.full([HALF], 1.0, gl.float32, row_layout)
    else:
        top = gl.full([HALF], NOTHING, gl.float32, row_layout)
        total = gl.zeros([HALF], gl.float32, row_layout)
    acc = gl.zeros([HALF, D], gl.float32, acc_layout)
    nothing = gl.zeros([HALF, BLOCK], gl.float32, score_layout)

    q = shared.q.at(ME).reshape([HALF, D])
    shared.q.wait(ME)
    shared.k.wait(0)
    _take_turn(shared, 0, ME, PING_PONG)
    scores = warpgroup_mma(q, shared.k.at(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    _pass_turn(shared, 0, ME, PING_PONG)
    scores = warpgroup_mma_wait(0, (scores,))
    shared.k.release(0)
    key0 = (tile.blocks - 1) * BLOCK
    exact, top, total, _ = _softmax(scores, top, total, scale_log2, position, key0, True)
    weights = gl.convert_layout(exact.to(dtype), weight_layout)
    shared.k.wait(1, tile.blocks > 1)
    whole = (tile.ahead + tile.first_query + 1) // BLOCK  # blocks that every row sees whole
    masked = gl.minimum(gl.maximum(tile.blocks - whole, 1), tile.blocks)
    for step in range(1, masked):
        acc, weights, top, total = _step(acc, weights, top, total, step, step + 1 < tile.blocks, q, shared, position,
                                         key0 - step * BLOCK, scale_log2, True, ME, PING_PONG)  # fmt: skip
    for step in range(masked, tile.blocks):
        acc, weights, top, total = _step(acc, weights, top, total, step, step + 1 < tile.blocks, q, shared, position,
                                         key0 - step * BLOCK, scale_log2, False, ME, PING_PONG)  # fmt: skip
    last = tile.blocks - 1
    shared.v.wait(last)
    acc = warpgroup_mma(weights, shared.v.at(last), acc, is_async=True)
    acc, weights = warpgroup_mma_wait(0, (acc, weights))

    saw = position >= (
        0 if not SINKS else -BLOCK
    )  # else its keys were all masked: what was summed is void
    token = (tile.start + query).to(gl.int64)
    if LSE:
        level = gl.where(saw, (top + gl.log2(total)) * LN_2, -float("inf"))
        gl.store(lse + token * HEADS + heads, level, mask=ours)
    share = gl.convert_layout(gl.where(saw, 1.0 / total, 0.0), gl.SliceLayout(1, acc_layout))
    # To global memory in rows of 16 bytes, through the queries' buffer, which nobody uses any more.
    store_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    q.store((acc * share[:, None]).to(dtype))
    gl.thread_barrier()
    result = q.load(store_layout)
    row = ME * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, store_layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, store_layout))
    query = tile.first_query + row // GROUP
    place = (tile.start + query).to(gl.int64) * out_token + (
        tile.head * GROUP + row % GROUP
    ) * out_head
    gl.store(out + place[:, None] + column[None, :], result, mask=(query < tile.queries)[:, None])


@gluon.jit
def _find(starts, lengths, sequences, skip, KV_HEADS: gl.constexpr, GROUP: gl.constexpr):
    """This program's tile; one without blocks if it has none. Sequence s has slots from starts[s] // BLOCK_Q + s on."""
    BLOCK_Q: gl.constexpr = 2 * HALF // GROUP
    slot = gl.program_id(0) // KV_HEADS
    low = 0
    high = sequences - 1
    while low < high:  # the last sequence whose first slot is not behind this one
        middle = (low + high + 1) // 2
        if gl.load(starts + middle) // BLOCK_Q + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = gl.load(starts + low)
    queries = gl.load(starts + low + 1) - start
    length = gl.load(lengths + low)
    place = slot - (start // BLOCK_Q + low)
    first_query = (gl.cdiv(queries, BLOCK_Q) - 1 - place) * BLOCK_Q  # the most keys first
    there = (first_query >= 0) & (queries > skip)
    limit = gl.maximum(gl.minimum(length, length - queries + first_query + BLOCK_Q), 0)
    blocks = gl.where(there, gl.maximum(gl.cdiv(limit, BLOCK), 1), 0)
    head = gl.program_id(0) % KV_HEADS
    return low, Tile(start, queries, first_query, length - queries, blocks, limit, head)


@gluon.jit(do_not_specialize=["sequences", "skip"])
def prefill_kernel(
    q_view, k_view, v_view, tables, lengths, starts, out, lse, sinks,
    sequences, skip, scale_log2, table_stride, out_token, out_head, page_rows, head_rows, head_columns,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BUFFERS: gl.constexpr,
    SINKS: gl.constexpr, LSE: gl.constexpr, PING_PONG: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = q_view.dtype
    BOX_ROWS: gl.constexpr = k_view.block_type.shape[0]
    block_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=2
    )
    sequence, tile = _find(starts, lengths, sequences, skip, KV_HEADS, GROUP)
    if tile.blocks > 0:
        q = gl.allocate_shared_memory(dtype, [2] + q_view.block_type.shape, q_view.layout)  # noqa: RUF005
        k = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, D], block_layout)
        v = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, D], block_layout)
        shared = Shared(
            Ring(q, barriers(2, 1), barriers(2, 1), 2),
            Ring(k, barriers(BUFFERS, 1), barriers(BUFFERS, 2), BUFFERS),
            Ring(v, barriers(BUFFERS, 1), barriers(BUFFERS, 2), BUFFERS),
            barriers(2, 1) if PING_PONG else k,
        )
        table = tables + gl.to_tensor(sequence).to(gl.int64) * table_stride
        row, column = tile.head * head_rows, tile.head * head_columns
        HEADS: gl.constexpr = KV_HEADS * GROUP
        gl.warp_specialize([
            (_compute, (out, lse, sinks, shared, tile, scale_log2, out_token, out_head, HEADS, GROUP, D, SINKS, LSE,
                        PING_PONG, 0)),
            (_compute, (out, lse, sinks, shared, tile, scale_log2, out_token, out_head, HEADS, GROUP, D, SINKS, LSE,
                        PING_PONG, 1)),
            (_copy, (q_view, k_view, v_view, table, shared, tile, row, column, page_rows, GROUP, D, PAGE, BOX_ROWS)),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
