"""CUDA graphs of whole steps: captured once for each shape, replayed for every step that fits into it.

A launch from Python costs tens of microseconds, a node of a graph less than one, and a step has hundreds. Which shapes
there are is pure arithmetic (`shape_of`): close together, so that little is computed for padding.

    decode     one token for each sequence
    verify     a token and its drafts for each sequence: rows of at most so many tokens, whatever each of them has
    cascade    the same behind pages that all sequences share; in fewer sizes, because padding costs less there
    mixed      a few thousand tokens of anybody: what a server meets all the time, so shapes differ in tokens alone;
               up to a thousand also behind pages that all sequences share: agents with the same instructions
    large      more tokens than that, as when many prompts come at once: a shape for each kind of step

Decode and mixed graphs are captured in advance, or when first needed; a large one when its shape comes up for the
second time, because most never do. What takes the device longer than its launches take the host (`largest`) has no
graph, which would not make it faster, so such a step never waits for a capture. The same is true where
steps that share the device with decoding have a budget of time.

All graphs share one pool of memory: they run one after another, and what one leaves is read before the next replays.
"""

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from cairn.core.events import instant, span
from cairn.core.garbage_collection import held_collector
from cairn.serve.engine.batch import Layout, most_pages
from cairn.serve.engine.request import Limits
from cairn.serve.engine.runner import Forward
from cairn.serve.engine.step import Chunk

MOST_NEW_PAGES = 4096  # of all sequences of a step that is not a decode step
MOST_MIXED = 4096  # tokens
MOST_SHARED = 1024  # of these behind shared pages; with more, what is read again matters little
FEW_ROWS = 4  # of steps for which every number of drafts is captured in advance
SEQUENCES = (8, 32, 64, 128, 256, 512, 1024)  # of a large step


class Shape(NamedTuple):
    """Key of a captured graph."""

    layout: Layout
    fresh: bool = False  # no sequence has computed anything before
    shared: bool = False  # all sequences begin with the same pages
    # Most that rows may have, each in its slot (`engine.adapter_slots`); 0: none has one.
    adapters: int = 0


@functools.cache
def cascade_sizes(rows: int) -> tuple[int, ...]:
    """16, 32, 64, then steps of 64; the last is `rows`."""
    return tuple(sorted({size for size in (16, 32, *range(64, rows, 64)) if size < rows} | {rows}))


@functools.cache
def decode_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, then steps of 8 up to 64, of 16 up to 256, of 32 beyond; the last is `rows`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, rows + 1, 32)]
    return tuple(sorted({size for size in sizes if size < rows} | {rows}))


@functools.cache
def token_sizes(step_tokens: int) -> tuple[int, ...]:
    """Powers of two and what lies a quarter, a half and three quarters between them; the last is the budget."""
    sizes = [base + part * base // 4 for base in (2**n for n in range(6, 31)) for part in range(4)]
    return tuple(sorted({size for size in sizes if size < step_tokens} | {step_tokens}))


@functools.cache
def mixed_sizes(limits: Limits) -> tuple[int, ...]:
    """Steps of 64 up to 256, of 128 up to 2048 (rows that a tile of a product has), of 256 beyond."""
    sizes = {*range(64, 256, 64), *range(256, 2048, 128), *range(2048, MOST_MIXED + 1, 256)}
    most = min(limits.budget(decoding=True), MOST_MIXED)
    return tuple(sorted({size for size in sizes if size < most} | {most}))


@functools.cache
def shared_sizes(limits: Limits) -> tuple[int, ...]:
    """Token counts of captured mixed steps with a shared prefix."""
    sizes = mixed_sizes(limits)
    return tuple(size for size in sizes if size <= MOST_SHARED) or sizes[:1]


@functools.cache
def verify_widths(drafts: int) -> tuple[int, ...]:
    """Tokens that a row of a verifying step may have: 1, 2, 4, ..; the last is a token and all its drafts."""
    return tuple(sorted({2**n for n in range(6) if 2**n <= drafts} | {1 + drafts}))


def shape_of(chunks: Sequence[Chunk], limits: Limits, shared: bool = False) -> Shape | None:
    """The smallest shape that holds these chunks; None if they have none. `shared`: they stand behind shared pages."""
    exact = Layout.of(chunks, limits.page_tables, limits.drafts > 0)
    if exact.one_each and exact.samples == exact.sequences:
        sizes = cascade_sizes(limits.rows) if shared else decode_sizes(limits.rows)
        size = sizes[bisect_left(sizes, exact.sequences)]
        return Shape(Layout.decode(size), shared=shared) if exact.pages <= size else None
    if exact.verifies and exact.samples == exact.tokens:
        widths, sizes = verify_widths(limits.drafts), decode_sizes(limits.rows)
        width = widths[bisect_left(widths, exact.max_query)]
        shape = verify_shape(sizes[bisect_left(sizes, exact.sequences)], width, limits)
        fits = shape.layout.tokens <= 2 * limits.step_tokens and exact.pages <= shape.layout.pages
        return shape if fits else None
    if exact.pages > most_new_pages(limits):
        return None
    sizes = mixed_sizes(limits)
    if exact.tokens <= sizes[-1]:
        size = sizes[bisect_left(sizes, exact.tokens)]
        return mixed_shape(size, limits, exact.verifies)._replace(shared=shared)
    if sizes[-1] == limits.mixed_step_tokens:
        return None
    return _large_shape(exact, all(chunk.start == 0 for chunk in chunks), limits)


def verify_shape(rows: int, width: int, limits: Limits) -> Shape:
    """Rows of up to `width` tokens. As many sequences again have the padding of those that are shorter."""
    pages = rows * (1 + -(-width // limits.page_size))
    tokens = rows * width
    return Shape(Layout(2 * rows, tokens, pages, tokens, width, verifies=True, each_drawn=True))


def mixed_shape(tokens: int, limits: Limits, verifies: bool = False) -> Shape:
    """Any chunks of so many tokens: room for all rows, and for one more that has the padding."""
    longest = 1 << (mixed_sizes(limits)[-1] - 1).bit_length()
    rows, pages = limits.rows, most_new_pages(limits)
    samples = min(rows * (1 + limits.drafts), rows + tokens) if verifies else rows
    return Shape(Layout(rows + 1, tokens, pages, samples, max(2, longest), verifies))


def most_new_pages(limits: Limits) -> int:
    return min(MOST_NEW_PAGES, most_pages(limits))


def _large_shape(exact: Layout, fresh: bool, limits: Limits) -> Shape | None:
    sizes = token_sizes(limits.step_tokens)
    tokens = sizes[bisect_left(sizes, exact.tokens)]
    most = max(2, 1 << (exact.max_query - 1).bit_length())
    padding = -(-(tokens - exact.tokens) // most)
    sequences = next((n for n in SEQUENCES if n >= exact.sequences + padding), None)
    if sequences is None or sequences > 2 * limits.rows:
        return None
    samples = min(sequences, limits.rows) * (1 + limits.drafts if exact.verifies else 1)
    pages = most_new_pages(limits)
    return Shape(Layout(sequences, tokens, pages, samples, most, exact.verifies), fresh)


class Graphs:
    def __init__(
        self,
        limits: Limits,
        blank: Callable[[Shape], object],
        step: Callable[[Shape], Forward],
        largest: int = 0,
        warm: Callable[[Shape], object] | None = None,
        together: bool = False,
    ) -> None:
        """`blank`: put a step of this shape on the device that does nothing. `step`: launch what lies there.

        `warm`: launch each of its kernels at least once, before a capture; None: the step.
        `largest`: tokens of a large step that still gains by a graph; 0: any. `together`: with other ranks.
        """
        self.limits, self.largest, self.together = limits, largest, together
        self._blank, self._step, self._warm = blank, step, warm or step
        self._captured: dict[Shape, tuple[torch.cuda.CUDAGraph, Forward] | None] = {}
        self._seen: set[Shape] = set()
        self._pool: Any = None  # torch's handle of a pool of memory

    def ready(
        self, chunks: Sequence[Chunk], shared: bool = False, adapters: int = 0
    ) -> Shape | None:
        """The shape whose graph can run these chunks, captured by now. Call it before staging the step."""
        shape = shape_of(chunks, self.limits, shared)
        if shape is None:
            return None
        shape = shape._replace(adapters=adapters)
        if shape not in self._captured:
            if not self._gains(shape):
                return None
            self.capture(shape)
        return shape if self._captured[shape] is not None else None

    def _gains(self, shape: Shape) -> bool:
        """Is it common, or, if it is large, short enough to gain by a graph and here for the second time?"""
        tokens = shape.layout.tokens
        if tokens <= mixed_sizes(self.limits)[-1]:
            return True
        if self.largest and tokens > self.largest:
            return False
        is_repeated = shape in self._seen
        self._seen.add(shape)
        return is_repeated

    @property
    def is_settled(self) -> bool:
        """Nothing that came up once waits to be captured when it comes again."""
        return self._seen <= self._captured.keys()

    def replay(self, shape: Shape) -> Forward:
        """Run the step that lies on the device; what it leaves is in the same tensors each time."""
        captured = self._captured[shape]
        if captured is None:
            raise ValueError(f"there is no graph for {shape}; ask `ready` first")
        graph, left = captured
        graph.replay()
        return left

    def forget_adapters(self) -> None:
        """Steps with adapters have become other ones."""
        for shape in [shape for shape in self._captured if shape.adapters]:
            del self._captured[shape]
        if not any(self._captured.values()):
            self._pool = None  # it ended with the last graph

    def common_shapes(self) -> list[Shape]:
        """Every shape that is not large, the largest first: the graphs of the others then fit into its memory."""
        limits = self.limits
        mixed = [mixed_shape(size, limits)._replace(shared=True) for size in shared_sizes(limits)]
        mixed += [mixed_shape(size, limits) for size in mixed_sizes(limits)]
        decode = [Shape(Layout.decode(size)) for size in decode_sizes(limits.rows)]
        decode += [Shape(Layout.decode(size), shared=True) for size in cascade_sizes(limits.rows)]
        if limits.drafts:
            sizes, width = decode_sizes(limits.rows), 1 + limits.drafts
            fitting = [size for size in sizes if size * width <= 2 * limits.step_tokens]
            mixed += [verify_shape(size, width, limits) for size in fitting]
            if limits.device_drafts:  # without drafts, but at lengths that only the device knows
                mixed += [verify_shape(size, 1, limits) for size in sizes]
                few = [size for size in fitting if size <= FEW_ROWS]
                widths = verify_widths(limits.drafts)
                mixed += [verify_shape(size, some, limits) for size in few for some in widths]
        return [*reversed(mixed), *reversed(decode)]

    def capture_common(self) -> None:
        for shape in self.common_shapes():
            if shape not in self._captured:
                self.capture(shape)

    def capture(self, shape: Shape) -> None:
        """Capture a graph. If memory does not suffice, steps of this shape run without a graph.

        With other ranks that is an error: they have launched collectives that this one has not, and would wait for it.
        """
        with span("capture", tokens=shape.layout.tokens):
            try:
                self._captured[shape] = self._capture(shape)
            except torch.OutOfMemoryError as problem:
                if self.together:
                    raise
                self._captured[shape] = None
                instant("no graph", shape=str(shape), why=str(problem).splitlines()[0])

    def _capture(self, shape: Shape) -> tuple[torch.cuda.CUDAGraph, Forward]:
        self._blank(shape)
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._warm(shape)  # what is compiled, loaded or allocated lazily is so by then
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The end of an earlier engine's graph, when it is collected just now, would break off this capture.
        # Adapters are read in other threads, which may allocate meanwhile: only this thread's calls may break it off.
        mode = "thread_local"
        with held_collector(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode=mode):
            left = self._step(shape)
        self._pool = self._pool or graph.pool()
        return graph, left
