"""Parts that every Triton attention kernel is made of: which tile, which keys, how rows are loaded and masked.

Sequences are packed: their bounds lie in cu_seqlens on the GPU, and a program finds its own tile by a search there,
so that no grid depends on data. Nothing here knows about softmax or gradients.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cairn.kernels.attention.attention_problem import Problem

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
NOTHING = tl.constexpr(-1.0e30)  # a finite minus infinity: no NaN from the difference of two


@triton.jit
def find_tile(slot, cu, sequences, tokens, BLOCK: tl.constexpr):
    """Sequence and tile of a slot. Sequence s has the slots from cu[s] // BLOCK + s on: enough, and no sum to take.

    What lies behind the last sequence counts as one more.
    """
    low = 0
    high = sequences
    while low < high:  # the last sequence whose first slot is not behind this one
        middle = (low + high + 1) // 2
        if tl.load(cu + middle) // BLOCK + middle <= slot:
            low = middle
        else:
            high = middle - 1
    start = tl.load(cu + low)
    end = tl.load(cu + low + 1, mask=low < sequences, other=0)
    end = tl.where(low < sequences, end, tokens)
    return low, start, end - start, slot - (start // BLOCK + low)


@triton.jit
def span(cu, sequence, sequences):
    """Start and length of a sequence; nothing for the rows behind the last one."""
    there = sequence < sequences
    start = tl.load(cu + sequence, mask=there, other=0)
    return start, tl.load(cu + sequence + 1, mask=there, other=0) - start


@triton.jit
def query_tile(
    slot, cu_q, cu_k, sequences, tokens, max_q, max_k, BLOCK: tl.constexpr, DENSE: tl.constexpr
):
    """The sequence, start and length of its queries and keys, and the tile's first row: the longest tiles come first.

    A negative row means a slot that no tile needs.
    """
    if DENSE:
        tiles = tl.cdiv(max_q, BLOCK)
        sequence = slot // tiles
        q_start, q_length, place = sequence * max_q, max_q, slot % tiles
        k_start, k_length = sequence * max_k, max_k
    else:
        sequence, q_start, q_length, place = find_tile(slot, cu_q, sequences, tokens, BLOCK)
        k_start, k_length = span(cu_k, sequence, sequences)
    return (
        sequence,
        q_start,
        q_length,
        k_start,
        k_length,
        (tl.cdiv(q_length, BLOCK) - 1 - place) * BLOCK,
    )


@triton.jit
def padded_start(sequence, start, longest, BLOCK: tl.constexpr, DENSE: tl.constexpr):
    """Where a sequence starts if each begins a tile of its own: as many tiles as there are slots."""
    if DENSE:
        return sequence * (tl.cdiv(longest, BLOCK) * BLOCK)
    else:
        return (start // BLOCK + sequence) * BLOCK


@triton.jit
def key_ranges(row0, q_length, k_length, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
               WINDOW: tl.constexpr):  # fmt: skip
    """lo, full_lo, full_hi, hi for a tile of queries; all but hi are multiples of BLOCK_N.

    lo .. full_lo: the edge of the window. full_lo .. full_hi: every query sees all. Up to hi: diagonal, end.
    """
    ahead = k_length - q_length
    lo = 0
    full_lo = 0
    hi = k_length
    full_hi = k_length // BLOCK_N * BLOCK_N
    if CAUSAL:
        hi = tl.maximum(tl.minimum(k_length, row0 + BLOCK_M + ahead), 0)
        full_hi = tl.maximum(row0 + ahead + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW:
        lo = tl.maximum(row0 + ahead + 1 - window, 0) // BLOCK_N * BLOCK_N
        full_lo = tl.cdiv(tl.maximum(row0 + BLOCK_M + ahead - window, 0), BLOCK_N) * BLOCK_N
        full_lo = tl.minimum(full_lo, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    return lo, full_lo, full_hi, hi


@triton.jit
def rows_source(base, start, length, heads, stride, stride_head, ROWS: tl.constexpr, D: tl.constexpr,
                BLOCK_D: tl.constexpr, TMA: tl.constexpr):  # fmt: skip
    """Where `load_rows` reads one sequence: a pointer, or a descriptor that ends with the sequence and each head."""
    base += tl.cast(start, tl.int64) * stride
    if TMA:
        length = tl.maximum(length, 1)  # a descriptor of no rows is no descriptor
        # fmt: off
        return tl.make_tensor_descriptor(base, [length, heads, D], [stride, stride_head, 1], [ROWS, 1, BLOCK_D])  # pyrefly: ignore
        # fmt: on
    else:
        return base


@triton.jit
def load_rows(source, row0, head, length, stride, stride_head, ROWS: tl.constexpr, D: tl.constexpr,
              BLOCK_D: tl.constexpr, TMA: tl.constexpr, CHECK: tl.constexpr):  # fmt: skip
    """ROWS x BLOCK_D of a head, from row0 on; zeros behind `length` if asked to check (a descriptor always does)."""
    if TMA:
        return source.load([row0, head, 0]).reshape([ROWS, BLOCK_D])
    else:
        rows = tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        source += tl.cast(row0, tl.int64) * stride + tl.cast(head, tl.int64) * stride_head
        pointers = source + rows[:, None] * stride + columns[None, :]
        if CHECK:
            there = (row0 + rows < length)[:, None] & (columns < D)[None, :]
            return tl.load(pointers, mask=there, other=0.0)
        elif BLOCK_D != D:
            return tl.load(pointers, mask=(columns < D)[None, :], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def bounded(x):
    """tanh, to the last bits: two special-function instructions."""
    return 1.0 - 2.0 / (tl.math.exp2(x * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def visible(position, key, length, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Which queries (at absolute positions) see which keys; shapes broadcast."""
    seen = key < length
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOW:
        seen = seen & (key > position - window)
    return seen


def slots(tokens: int, problem: Problem, longest: int, block: int) -> int:
    """Programs per head that are enough for any lengths with this many tokens."""
    if problem.dense:
        return problem.sequences * -(-longest // block)
    return tokens // block + problem.sequences + 1


def takes_descriptors(*tensors: Tensor) -> bool:
    """TMA wants 16-byte rows and addresses, and at least one row."""
    return all(
        t.element_size() == 2 and t.stride(0) % 8 == 0 and t.stride(1) % 8 == 0
        and t.data_ptr() % 16 == 0 and t.shape[0] > 0
        for t in tensors
    )  # fmt: skip


def scratch_memory(size: int, alignment: int, stream: int | None) -> Tensor:
    """Allocator of scratch memory for descriptors that programs create."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


def score_scale(problem: Problem) -> float:
    """Factor of q k: into units of log2(e), or into those of the soft-cap."""
    return problem.scale / problem.softcap if problem.softcap else problem.scale * LOG2_E.value


def size_class(keys: int) -> int:
    """Configurations are kept for powers of two."""
    return min(1 << (max(keys, 1) - 1).bit_length(), 32768)
