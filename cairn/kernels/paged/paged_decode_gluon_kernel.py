# pyrefly: ignore-errors
"""The decode kernel of paged attention in Gluon for sm_90: a warp that copies without a pause, four that compute.

    copying warp      pages by TMA into a ring of buffers, across the borders of sequences and heads
    computing warps   scores, softmax and values of a tile; at the end of a pair its result, or its part of one

The line of tiles, its equal pieces and the parts of pairs that are cut are those of `paged_decode`, where each pair
starts a pipeline of its own and lets the memory rest meanwhile. Here it never rests. With PREFETCH the old pages are
asked for before the predecessor has ended: only the tile that has a sequence's newest token waits for it.

With STARTS a sequence may have several queries, which read its keys once: rows of a tile are queries x heads. With
STARTS = 2 sequences that have several are left to another kernel.

A copy is BOX rows of a page. What a last tile has no tokens for is not read from memory: those rows are filled with
ones that were just read (a weight of 0 meets something finite). Tiles are cut as whole ones all the same.

Takes 16-bit numbers, D 64 or 128, up to 16 queries x heads that share a key head, pages of any size; no window,
soft-cap, sink or log-sum-exp. A cache of float8 becomes float16 on its way into the tensor cores, which holds each of
its values; the scale of keys multiplies the scores, and that of values the result. The cache must be finite
everywhere: allocate it with zeros.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from cairn.kernels.attention.attention_rings import Ring, barriers

NOTHING = gl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two
LN_2 = gl.constexpr(0.6931471805599453)
LOG2_E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(16)  # queries x heads of a group, padded to what the tensor cores take
# Two columns of float8 of two keys -> float16 of both keys: the first column, and the second.
SORTED = gl.constexpr("""{
    .reg .b32 t;
    .reg .b16 first, second;
    prmt.b32 t, $2, 0, 0x3120;
    mov.b32 {first, second}, t;
    cvt.rn.f16x2.e4m3x2 $0, first;
    cvt.rn.f16x2.e4m3x2 $1, second;
}""")


@aggregate
class Line:
    """This program's piece of the line of tiles."""

    place: gl.tensor
    end: gl.tensor
    piece: gl.tensor  # tiles of a program
    sequence: gl.tensor  # where it starts
    before: gl.tensor  # tiles of all sequences before that one

    @gluon.constexpr_function
    def __init__(self, place, end, piece, sequence, before):
        self.place, self.end, self.piece = place, end, piece
        self.sequence, self.before = sequence, before


@gluon.jit
def _plus(a, b):
    return a + b


@gluon.jit
def _ours(queries, STARTS: gl.constexpr):
    """Those of a sequence that this kernel computes."""
    if STARTS == 2:
        return gl.where(queries == 1, 1, 0)
    else:
        return queries


@gluon.jit
def _of_sequence(lengths, starts, sequence, STARTS: gl.constexpr):
    """Its keys, none where it has no query; its first row, and how many queries it has."""
    length = gl.load(lengths + sequence)
    if STARTS:
        first = gl.load(starts + sequence)
        queries = _ours(gl.load(starts + sequence + 1) - first, STARTS)
        return gl.where(queries > 0, length, 0), first, queries
    else:
        return length, sequence, 1


@gluon.jit
def _cut(
    lengths, starts, sequences, KV_HEADS: gl.constexpr, SEQUENCES: gl.constexpr, BLOCK: gl.constexpr,
    STARTS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([max(SEQUENCES // 128, 1)], [32], [4], [0])
    every = gl.arange(0, SEQUENCES, layout=layout)
    there = every < sequences
    tiles = gl.cdiv(gl.load(lengths + every, mask=there, other=0), BLOCK)
    if STARTS:
        first = gl.load(starts + every, mask=there, other=0)
        queries = gl.load(starts + every + 1, mask=there, other=0) - first
        tiles = gl.where(_ours(queries, STARTS) > 0, tiles, 0)
    ends = gl.associative_scan(tiles, 0, _plus) * KV_HEADS
    line = gl.sum(tiles, 0) * KV_HEADS
    piece = gl.cdiv(line, gl.num_programs(0))
    place = gl.program_id(0) * piece
    sequence = gl.sum((ends <= place).to(gl.int32), 0)
    before = gl.max(gl.where(ends <= place, ends, 0), 0)
    return Line(place, gl.minimum(place + piece, line), piece, sequence, before)


@gluon.jit
def pages_of_tile(table, tile, length, PAGE: gl.constexpr, BLOCK: gl.constexpr):
    """The pages of a tile. Behind the end: page 0."""
    EACH: gl.constexpr = min(PAGE, BLOCK)
    found = ()
    for piece in gl.static_range(BLOCK // EACH):
        token = tile * BLOCK + piece * EACH
        found = found + (gl.load(table + token // PAGE, mask=token < length, other=0),)  # noqa: RUF005
    return found


@gluon.jit
def copy_tile(view, ring, step, pages, tile, length, row, column, page_rows, D: gl.constexpr, PAGE: gl.constexpr,
               BOX: gl.constexpr, BLOCK: gl.constexpr):  # fmt: skip
    """One tile of keys or of values."""
    PIECES: gl.constexpr = BLOCK // BOX
    COLUMNS: gl.constexpr = view.block_type.shape[1]
    boxes = ring.at(step)._reinterpret(
        view.dtype, [PIECES * (D // COLUMNS), BOX, COLUMNS], view.layout
    )
    ring.begin(step, BLOCK * D * view.dtype.primitive_bitwidth // 8)
    first = pages[0] * page_rows + row + tile * BLOCK % PAGE
    for piece in gl.static_range(PIECES):
        token = tile * BLOCK + piece * BOX
        if PAGE >= BLOCK:
            at = first + piece * BOX
        else:
            at = pages[piece * BOX // PAGE] * page_rows + row + token % PAGE
        at = gl.where(token < length, at, first)
        for part in gl.static_range(D // COLUMNS):
            tma.async_copy_global_to_shared(
                view,
                [at, column + part * COLUMNS],
                ring.filled(step),
                boxes.index(part * PIECES + piece),
            )


@gluon.jit
def _copy(k_view, v_view, k_ring, v_ring, tables, lengths, starts, line, table_stride, page_rows, head_rows,
          head_columns, KV_HEADS: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, BOX: gl.constexpr,
          BLOCK: gl.constexpr, OVERLAP: gl.constexpr, PREFETCH: gl.constexpr, STARTS: gl.constexpr):  # fmt: skip
    if OVERLAP and not PREFETCH:
        gdc_wait()
    place = line.place
    sequence = line.sequence
    before = line.before
    step = 0
    while place < line.end:
        length, _, queries = _of_sequence(lengths, starts, sequence, STARTS)
        tiles = gl.cdiv(length, BLOCK)
        head = (place - before) // gl.maximum(tiles, 1)
        done = (place - before) % gl.maximum(tiles, 1)
        count = gl.minimum(tiles - done, line.end - place)
        newest = (length - queries) // BLOCK  # the tile that has the first new token
        table = tables + gl.to_tensor(sequence).to(gl.int64) * table_stride
        row = head * head_rows
        column = head * head_columns
        pages = pages_of_tile(table, done, length, PAGE, BLOCK)
        for tile in range(done, done + count):
            next_pages = pages_of_tile(
                table, tile + 1, length, PAGE, BLOCK
            )  # before they are needed
            if OVERLAP and PREFETCH:  # noqa: SIM102  (known to the compiler)
                if tile >= newest:  # the keys of new tokens are the predecessor's work
                    gdc_wait()
            copy_tile(
                k_view,
                k_ring,
                step,
                pages,
                tile,
                length,
                row,
                column,
                page_rows,
                D,
                PAGE,
                BOX,
                BLOCK,
            )
            copy_tile(
                v_view,
                v_ring,
                step,
                pages,
                tile,
                length,
                row,
                column,
                page_rows,
                D,
                PAGE,
                BOX,
                BLOCK,
            )
            pages = next_pages
            step += 1
        place += count
        if place >= before + tiles * KV_HEADS:
            before = place
            sequence += 1


@gluon.jit
def _column_pairs(memory, layout: gl.constexpr, BLOCK: gl.constexpr, D: gl.constexpr):
    """Values of float8 as two operands of float16: the even columns and the odd ones.

    The tensor cores want two keys of a column side by side, and memory has two columns of a key: those are read as one
    number of 16 bits, which is the width that a transposing read has, and sorted in registers.
    """
    wide: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, D), element_bitwidth=16, rank=2
    )
    pairs = memory._reinterpret(gl.int16, [BLOCK, D // 2], wide).load(layout)
    return gl.inline_asm_elementwise(
        SORTED, "=r,=r,r", [pairs], dtype=(gl.float16, gl.float16), is_pure=True, pack=2
    )


@gluon.jit
def _upper(values, other, UPPER: gl.constexpr):
    """Rows 0 to 7, and a constant below them where there are no other rows (UPPER).

    A thread has rows r and r + 8, so that the compiler drops the second: half of the registers and of the arithmetic.
    """
    if UPPER:
        layout: gl.constexpr = values.type.layout
        if len(values.shape) == 2:
            there = (gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)) < ROWS // 2)[:, None]
        else:
            there = gl.arange(0, ROWS, layout=layout) < ROWS // 2
        return gl.where(there, values, other)
    else:
        return values


@gluon.jit
def _tile(
    q, acc, sums, top, k_ring, v_ring, step, key0, seen, scale_log2, BLOCK: gl.constexpr, D: gl.constexpr,
    PAIRS: gl.constexpr, STARTS: gl.constexpr, UPPER: gl.constexpr,
):  # fmt: skip
    """Scores, softmax and values of one tile. `acc` is one tensor, or two of the even and the odd columns (PAIRS).

    `seen`: keys that all rows see, or each of them (STARTS). A row that sees none of a part's keys leaves a level that
    weighs nothing beside the other parts.
    """
    layout: gl.constexpr = acc[0].type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, layout, 2)
    k_ring.wait(step)
    keys = (
        k_ring.at(step)
        .permute((1, 0))
        .load(gl.DotOperandLayout(1, layout, q.type.layout.k_width))
        .to(q.dtype)
    )
    scores = mma_v2(q, keys, gl.zeros([ROWS, BLOCK], gl.float32, layout)) * scale_log2
    key = key0 + gl.arange(0, BLOCK, layout=gl.SliceLayout(0, layout))
    if STARTS:
        scores = gl.where(key[None, :] < seen[:, None], scores, NOTHING)
    else:
        scores = _upper(gl.where((key < seen)[None, :], scores, NOTHING), NOTHING, UPPER)
    new_top = _upper(gl.maximum(top, gl.max(scores, 1)), 0.0, UPPER)
    weights = _upper(gl.exp2(scores - new_top[:, None]), 0.0, UPPER)
    shrink = gl.exp2(top - new_top)[:, None]
    # Added up at the end of the pair, which spares a meeting of the warps.
    sums = _upper(sums * shrink + weights, 0.0, UPPER)
    weights = _upper(gl.convert_layout(weights.to(q.dtype), left), 0.0, UPPER)
    v_ring.wait(step)
    if PAIRS:
        even, odd = _column_pairs(v_ring.at(step), right, BLOCK, D)
        first = mma_v2(weights, even, _upper(acc[0] * shrink, 0.0, UPPER))
        acc = (first, mma_v2(weights, odd, _upper(acc[1] * shrink, 0.0, UPPER)))
    else:
        before = _upper(acc[0] * shrink, 0.0, UPPER)
        acc = (mma_v2(weights, v_ring.at(step).load(right), before),)
    gl.thread_barrier()  # all warps have read the buffers
    k_ring.release(step)
    v_ring.release(step)
    return acc, sums, new_top


@gluon.jit
def _nothing(D: gl.constexpr, layout: gl.constexpr, PAIRS: gl.constexpr):
    """What `_tile` adds to."""
    if PAIRS:
        half = gl.zeros([ROWS, D // 2], gl.float32, layout)
        return (half, half)
    else:
        return (gl.zeros([ROWS, D], gl.float32, layout),)


@gluon.jit
def _all_columns(acc, D: gl.constexpr, layout: gl.constexpr, PAIRS: gl.constexpr):
    if PAIRS:
        return gl.convert_layout(gl.join(acc[0], acc[1]).reshape([ROWS, D]), layout)
    else:
        return acc[0]


@gluon.jit
def _add_up(partial, partial_lse, owner, parts, row, column, D: gl.constexpr):
    """All parts of a pair, in the order of the programs."""
    slice_layout: gl.constexpr = row.type.layout
    layout: gl.constexpr = slice_layout.parent
    acc = gl.zeros([ROWS, D], gl.float32, layout)
    top = gl.full([ROWS], NOTHING, gl.float32, slice_layout)
    total = gl.zeros([ROWS], gl.float32, slice_layout)
    for part in range(parts):
        slot = gl.where(part == 0, 2 * owner + 1, 2 * (owner + part)) * ROWS + row
        # Past the first-level cache, which may hold what lay here before.
        level = gl.load(partial_lse + slot, cache_modifier=".cg") * LOG2_E
        values = gl.load(partial + slot[:, None] * D + column[None, :], cache_modifier=".cg")
        new_top = gl.maximum(top, level)
        weight = gl.exp2(level - new_top)
        shrink = gl.exp2(top - new_top)
        total = total * shrink + weight
        acc = acc * shrink[:, None] + values * weight[:, None]
        top = new_top
    return acc / total[:, None]


@gluon.jit
def _rows_at(
    tensor, first, queries, head, row, per_token, per_head, GROUP: gl.constexpr, STARTS: gl.constexpr
):  # fmt: skip
    """Where the rows of a pair begin, and which of them there are."""
    token = gl.to_tensor(first).to(gl.int64)
    if STARTS:
        heads = head * GROUP + row % GROUP
        return tensor + (token + row // GROUP) * per_token + heads * per_head, row < queries * GROUP
    else:
        return tensor + token * per_token + (head * GROUP + row) * per_head, row < GROUP


@gluon.jit
def _compute(q, out, partial, partial_lse, arrivals, lengths, starts, k_ring, v_ring, line, sequences, scale_log2,
             q_token, q_head, out_token, out_head, k_scale, v_scale, KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
             D: gl.constexpr, BLOCK: gl.constexpr, OVERLAP: gl.constexpr, SCALES: gl.constexpr,
             STARTS: gl.constexpr):  # fmt: skip
    PAIRS: gl.constexpr = SCALES > 0
    UPPER: gl.constexpr = STARTS != 1 and GROUP <= ROWS // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 4], [16, 8])
    # A thread takes 4 bytes of a key at once: with float8 these are four columns of both operands.
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 4 if SCALES else 2)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    if OVERLAP:
        gdc_wait()
    place = line.place
    sequence = line.sequence
    before = line.before
    step = 0
    while place < line.end:
        length, first, queries = _of_sequence(lengths, starts, sequence, STARTS)
        tiles = gl.cdiv(length, BLOCK)
        head = (place - before) // gl.maximum(tiles, 1)
        done = (place - before) % gl.maximum(tiles, 1)
        count = gl.minimum(tiles - done, line.end - place)
        if count > 0:
            at_q, ours = _rows_at(q, first, queries, head, row, q_token, q_head, GROUP, STARTS)
            rows_q = gl.load(at_q[:, None] + column[None, :], mask=ours[:, None], other=0.0)
            seen = length
            if STARTS:
                seen = length - queries + row // GROUP + 1
            if SCALES:
                rows_q = (rows_q.to(gl.float32) * scale_log2).to(gl.float16)
                sharpness = gl.load(k_scale + head * (SCALES - 1))
                growth = gl.load(v_scale + head * (SCALES - 1))
            else:
                sharpness = scale_log2
            tile_q = _upper(gl.convert_layout(rows_q, left), 0.0, UPPER)
            going = _nothing(D, layout, PAIRS)
            sums = gl.zeros([ROWS, BLOCK], gl.float32, layout)
            top = _upper(
                gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(1, layout)), 0.0, UPPER
            )
            for tile in range(done, done + count):
                going, sums, top = _tile(
                    tile_q, going, sums, top, k_ring, v_ring, step, tile * BLOCK, seen, sharpness, BLOCK, D, PAIRS,
                    STARTS, UPPER,
                )  # fmt: skip
                step += 1
            total = gl.sum(sums, 1)
            acc = _all_columns(going, D, layout, PAIRS) / total[:, None]
            if SCALES:
                acc = acc * growth
            at_out, _ = _rows_at(out, first, queries, head, row, out_token, out_head, GROUP, STARTS)
            there = at_out[:, None] + column[None, :]
            if count == tiles:
                gl.store(there, acc.to(out.dtype.element_ty), mask=ours[:, None])
            else:
                # At most one pair comes in from the program before, and at most one goes on to the next.
                slot = (2 * gl.program_id(0) + (done == 0).to(gl.int32)) * ROWS + row
                gl.store(partial + slot[:, None] * D + column[None, :], acc)
                gl.store(partial_lse + slot, (top + gl.log2(total)) * LN_2)
                owner = (place - done) // line.piece
                parts = gl.cdiv(place - done + tiles, line.piece) - owner
                gl.thread_barrier()  # every thread has stored its share before one of them says so
                if gl.atomic_add(arrivals + owner, 1, sem="acq_rel") == parts - 1:
                    acc = _add_up(partial, partial_lse, owner, parts, row, column, D)
                    gl.store(there, acc.to(out.dtype.element_ty), mask=ours[:, None])
                    gl.store(arrivals + owner, 0)  # for the next launch
        place += count
        if place >= before + tiles * KV_HEADS:
            before = place
            sequence += 1
    nothing = gl.zeros([ROWS, D], gl.float32, layout).to(out.dtype.element_ty)
    for sequence in range(gl.program_id(0), sequences, gl.num_programs(0)):
        length, first, queries = _of_sequence(lengths, starts, sequence, STARTS)
        if length <= 0:
            for head in range(KV_HEADS):
                at_out, ours = _rows_at(
                    out, first, queries, head, row, out_token, out_head, GROUP, STARTS
                )
                gl.store(at_out[:, None] + column[None, :], nothing, mask=ours[:, None])


@gluon.jit(do_not_specialize=["sequences"])
def decode_kernel(
    k_view, v_view, q, tables, lengths, starts, out, partial, partial_lse, arrivals, k_scale, v_scale,
    sequences, scale_log2, table_stride, q_token, q_head, out_token, out_head, page_rows, head_rows, head_columns,
    KV_HEADS: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, SEQUENCES: gl.constexpr,
    BUFFERS: gl.constexpr, EARLY: gl.constexpr, OVERLAP: gl.constexpr, PREFETCH: gl.constexpr,
    REGISTERS: gl.constexpr, SCALES: gl.constexpr, BLOCK: gl.constexpr, STARTS: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_view.dtype
    BITS: gl.constexpr = dtype.primitive_bitwidth
    BOX: gl.constexpr = k_view.block_type.shape[0]
    tile_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=min(128, D * BITS // 8), element_bitwidth=BITS, rank=2
    )
    if OVERLAP:
        if EARLY:
            gdc_launch_dependents()
        if not PREFETCH:
            gdc_wait()
    line = _cut(lengths, starts, sequences, KV_HEADS, SEQUENCES, BLOCK, STARTS)
    k = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, D], tile_layout)
    v = gl.allocate_shared_memory(dtype, [BUFFERS, BLOCK, D], tile_layout)
    k_ring = Ring(k, barriers(BUFFERS, 1), barriers(BUFFERS, 1), BUFFERS)
    v_ring = Ring(v, barriers(BUFFERS, 1), barriers(BUFFERS, 1), BUFFERS)
    gl.warp_specialize([
        (_compute, (q, out, partial, partial_lse, arrivals, lengths, starts, k_ring, v_ring, line, sequences,
                    scale_log2, q_token, q_head, out_token, out_head, k_scale, v_scale, KV_HEADS, GROUP, D, BLOCK,
                    OVERLAP, SCALES, STARTS)),
        (_copy, (k_view, v_view, k_ring, v_ring, tables, lengths, starts, line, table_stride, page_rows, head_rows,
                 head_columns, KV_HEADS, D, PAGE, BOX, BLOCK, OVERLAP, PREFETCH, STARTS)),
    ], [1], [REGISTERS])  # fmt: skip
