"""Sizing of the KV cache: the number of blocks and concurrent requests, with an explanation.

    memory of the device * fraction - weights - what a step needs besides = pages

Pure arithmetic: the caller has measured. A model that does not fit is refused with what it needs and what would.
"""

from collections.abc import Sequence
from typing import NamedTuple

from cairn.core.errors import HardwareError
from cairn.core.units import format_bytes
from cairn.models.cache import CacheGroup, cache_bytes_per_token, most_pages
from cairn.models.spec import ModelSpec

GPU_ROWS, CPU_ROWS = 512, 256  # requests that run at once, unless told
GPU_PAGE, CPU_PAGE = 64, 16  # tokens of a page
GPU_STEP_TOKENS, CPU_STEP_TOKENS = 16384, 2048
SNAPSHOTS = 2  # of states, for each row: where conversations are likely to go on
LEAST_PAGES = 2  # the padding page, and one for requests
SPARE = 1 << 30  # of a GPU, for graphs, workspaces and what the libraries take


class Memory(NamedTuple):
    """Bytes of one device."""

    total: int
    free: int  # after the weights have been loaded
    spare: int = SPARE  # outside of the pages; a CPU has no graphs, and needs none


class Sizes(NamedTuple):
    pages: int
    page_size: int
    why: str


def step_bytes(spec: ModelSpec, step_tokens: int, rows: int, value_bytes: int) -> int:
    """Peak memory of a step: the widest activations of its tokens, and the logits of its rows."""
    kept = cache_bytes_per_token(spec, 1) / len(spec.token_layers)  # keys and values of a layer
    projected = int(spec.heads * spec.head_dim + kept)
    wide = max((1 + spec.gated) * spec.intermediate + spec.intermediate, 2 * projected)
    if spec.delta is not None:
        keys, values = spec.delta.keys, spec.delta.values
        of_heads = (
            values + spec.delta.value_heads * spec.delta.key_width
        )  # U and W of `delta_chunk`
        # All projections, q, k and v before and behind the convolution, and outputs before and behind the gate.
        wide = max(wide, 2 * (keys + values) + 2 * (2 * keys + values) + of_heads + 2 * values)
    per_token = (4 * spec.hidden + wide) * value_bytes
    logits = rows * spec.vocab * (value_bytes + 4)  # once as computed, once in float32
    return step_tokens * per_token + logits


def size_states(of_state: float, memory: Memory, fraction: float, step: int, rows: int) -> int:
    """Slots for states of so many bytes: one for each row and room for snapshots, in at most half of what is left."""
    if not of_state:
        return 0
    room = int(memory.free - (1 - fraction) * memory.total) - step - memory.spare
    return max(1, min((1 + SNAPSHOTS) * rows, int(room / 2 / of_state)))


def size_pages(
    groups: Sequence[CacheGroup],
    memory: Memory,
    fraction: float,
    page_size: int,
    page_bytes: int,
    step: int,
    rows: int,
    context: int,
    step_tokens: int = 0,
) -> Sizes:
    """Number of blocks that fit, limited to what all rows could fill.

    One pool serves all groups, so there is nothing to split: a window group of a row holds no more than its window,
    and beyond that what one step writes.
    """
    beside = step + memory.spare
    room = int(memory.free - (1 - fraction) * memory.total) - beside
    fit = room // page_bytes
    windows = sum(group.kind == "window" for group in groups)
    demand = rows * most_pages(groups, context, page_size) + 1
    demand += windows * (rows + -(-min(step_tokens, rows * context) // page_size))
    if fit < LEAST_PAGES:
        needed = LEAST_PAGES * page_bytes
        share = "" if fraction == 1 else f" ({fraction:.0%} of which may be used)"
        raise HardwareError(
            f"{format_bytes(memory.free, 'binary')} are left of {format_bytes(memory.total, 'binary')}"
            f"{share}; a step needs {format_bytes(beside, 'binary')} "
            f"and one page of {page_size} tokens {format_bytes(page_bytes, 'binary')}",
            hint=f"{format_bytes(needed - room, 'binary')} are missing: lower max_num_batched_tokens or "
            "max_num_seqs, raise gpu_memory_utilization, or use a smaller model",
        )
    pages = min(fit, demand)
    if pages == demand:
        why = f"all that {rows} requests of {context} tokens can fill"
    else:
        share = "" if fraction == 1 else f"{fraction:.0%} of "
        why = f"what {share}{format_bytes(memory.total, 'binary')} leaves"
    return Sizes(pages, page_size, why)
