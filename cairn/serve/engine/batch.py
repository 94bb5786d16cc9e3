"""Device inputs of a step, transferred from the host in one copy.

    chunks -words-> one pinned array of int32 -one copy-> the same array on the device -views-> Decided

Each running request has a row for as long as it runs: the pages it has and the token sampled last stay on the device,
and a step sends only what is new. A decode step of 256 requests is a few kilobytes. Pinned arrays take turns, so that
the host never writes to one that a copy may still be reading. On a CPU the array is used where it is. Knows nothing
about models, and about requests only what a chunk says.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cairn.kernels.paged.step_inputs import Decided, Inputs, State, step_inputs
from cairn.kernels.sampling.draft_ngrams import draft_ngrams
from cairn.serve.engine.cpu_inputs import inputs_on_cpu, place_drafts
from cairn.serve.engine.pieces import words_of_pieces
from cairn.serve.engine.request import Limits, Request
from cairn.serve.engine.spans import axes_offsets
from cairn.serve.engine.step import Chunk

TURNS = 4  # pinned arrays: more than there are steps in flight
SAMPLED_LAST = -1  # a token that only the device knows
LENGTH_ON_DEVICE = -1  # a start that only the device knows
PADDING_ROW = -1  # a row of padding
ALIGNED = 4  # words
NO_BOUNDS: tuple[int, ...] = ()


class Layout(NamedTuple):
    """Capacities of a step's buffers. A CUDA graph is captured for one layout."""

    sequences: int
    tokens: int
    pages: int  # new places of page tables; each has a page of every cache group
    samples: int
    max_query: int  # no sequence has more tokens, padding included
    verifies: bool = False  # sequences have drafts, or begin where only the device knows
    each_drawn: bool = False  # a token is drawn behind every token of the step, in their order

    def sizes(self, groups: int, axes: bool = False) -> tuple[int, ...]:
        """Words of each part, with so many cache groups; `axes`: tokens have numbers beside their positions."""
        b, s, places = self.sequences, self.samples, self.pages
        bounds, numbers = b + 1 if self.verifies else 0, 3 * self.tokens if axes else 0
        return (b, b, b + 1, b, b + 1, groups * places, self.tokens, s, s, 1, bounds, numbers)

    @staticmethod
    def of(chunks: Sequence[Chunk], groups: int = 1, drafts: bool = False) -> "Layout":
        """Exactly these chunks. `drafts`: some of them may have drafts, or be ahead of some."""
        return Layout(
            len(chunks),
            sum(chunk.count for chunk in chunks),
            sum(len(chunk.pages) for chunk in chunks) // groups,
            sum(chunk.samples for chunk in chunks),
            max((chunk.count for chunk in chunks), default=1),
            drafts and any(chunk.ahead or chunk.drafts for chunk in chunks),
        )

    @staticmethod
    def decode(sequences: int) -> "Layout":
        """Layout of a decode step: one token and at most one new block for each sequence."""
        return Layout(sequences, sequences, sequences, sequences, 1)

    @property
    def one_each(self) -> bool:
        return self.max_query == 1 and not self.verifies

    def padding(self, sequences: int, tokens: int) -> list[int]:
        """Token counts of the padding sequences that fill this layout."""
        full, rest = divmod(self.tokens - tokens, self.max_query)
        counts = [self.max_query] * full + [rest] * (rest > 0)
        empty = self.sequences - sequences - len(counts)
        if full < 0 or empty < 0:
            raise ValueError(f"{self} cannot hold {sequences} sequences of {tokens} tokens")
        return counts + [0] * empty


def most_pages(limits: Limits) -> int:
    """New places of tables in a step: whole tables, if all sequences begin with pages that others have filled."""
    return limits.rows * -(-limits.context // limits.page_size)


def words_of(limits: Limits) -> int:
    """Room for any step. Twice its sequences and tokens: the layout of a graph may have padding."""
    rows, tokens = 2 * limits.rows, 2 * limits.step_tokens
    samples = limits.rows * (1 + limits.drafts)
    layout = Layout(rows, tokens, most_pages(limits), samples, 1, limits.drafts > 0)
    return sum(map(aligned, layout.sizes(limits.page_tables, limits.axes)))


def aligned(size: int) -> int:
    """Words up to where the next part begins. Kernels are compiled for addresses that 16 bytes divide or that they do
    not divide: with parts that lie wherever the last one ends, a step of a new size would wait for the compiler."""
    return -(-size // ALIGNED) * ALIGNED


class Staged(NamedTuple):
    """A step on the device."""

    decided: Decided
    sample_at_S: Tensor  # which tokens of the step are followed by one that is sampled
    sample_rows_S: Tensor
    shared_1: Tensor  # tokens that all sequences begin with, as far as they were counted
    sample_bounds_B1: (
        Tensor  # which samples belong to which sequence; empty in a step that verifies nothing
    )
    offsets_3T: Tensor | None  # what is added to a position on each axis, where there are axes
    each_drawn: bool = False  # as in its layout: `sample_at_S` counts from 0

    @property
    def verifies(self) -> bool:
        return len(self.sample_bounds_B1) > 0


class Batch:
    """The rows of all running requests on the device, and room for one step's inputs."""

    def __init__(self, limits: Limits, device: torch.device | str) -> None:
        self.limits, self.device = limits, torch.device(device)
        table = -(-limits.context // limits.page_size)
        rows, tokens = limits.rows, limits.step_tokens

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._groups = groups = limits.page_tables
        self.state = State(integers(groups, rows, table), integers(rows), integers(rows))
        # Twice as much as a step can have: the layout of a graph may have padding.
        self.inputs = Inputs(
            integers(2 * tokens),
            integers(2 * tokens),
            integers(groups, 2 * tokens),
            integers(2 * rows),
            integers(groups, 2 * rows, table),
        )
        self.made_NK: Tensor | None = None  # drafts that a head has made; None: n-grams
        self.text_NC = integers(rows, limits.context) if limits.device_drafts else None
        most = words_of(limits)
        pinned = self.device.type == "cuda"
        self._host = [torch.zeros(most, dtype=torch.int32, pin_memory=pinned) for _ in range(TURNS)]
        self._device = integers(most) if pinned else None
        self._turn = 0

    def admit(self, request: Request) -> None:
        """The request has got a row: where the device drafts, its text is there before its first step."""
        if self.text_NC is None:
            return
        text = torch.tensor([*request.prompt, *request.outputs], dtype=torch.int32)
        if self.device.type == "cuda":
            text = text.pin_memory()
        self.text_NC[request.row, : len(text)].copy_(text, non_blocking=True)

    def stage(
        self, chunks: Sequence[Chunk], layout: Layout | None = None, shared: int = 0
    ) -> Staged:
        """Send what was decided; with a `layout` of more sequences, the rest is padding."""
        layout = layout or Layout.of(chunks, self._groups, self.limits.drafts > 0)
        self._turn = (self._turn + 1) % TURNS
        host = self._host[self._turn]
        used = _write(host.numpy(), chunks, layout, shared, self._groups, self.limits.axes)
        if self._device is None:
            return self.views(layout, host)
        self._device[:used].copy_(host[:used], non_blocking=True)
        return self.views(layout)

    def views(self, layout: Layout, words: Tensor | None = None) -> Staged:
        """Device views of a step with this layout, at constant addresses."""
        words = self._device if words is None else words
        if words is None:
            raise ValueError("on a CPU a step lies where it was staged")
        parts, start = [], 0
        for size in layout.sizes(self._groups, self.limits.axes):
            parts.append(words[start : start + size])
            start += aligned(size)
        *decided, sample_at, sample_rows, shared, sample_bounds, offsets = parts
        offsets_3T = offsets.view(3, -1) if self.limits.axes else None
        where = (sample_at, sample_rows, shared, sample_bounds, offsets_3T)
        return Staged(Decided(*decided), *where, layout.each_drawn)

    def make_inputs(self, staged: Staged) -> Inputs:
        """Tokens, positions, slots, lengths and tables of the step; new pages enter the rows' tables."""
        make, decided = step_inputs if self.device.type == "cuda" else inputs_on_cpu, staged.decided
        make(decided, self.state, self.limits.page_size, self.inputs)
        inputs = self.inputs_of(staged)
        if self.text_NC is not None and self.made_NK is not None and self.device.type == "cpu":
            place_drafts(decided, inputs, self.text_NC, self.made_NK)
        elif self.text_NC is not None:
            rows_B, bounds_B1 = decided.rows_B, decided.bounds_B1
            tokens_T, positions_T = inputs.tokens_T, inputs.positions_T
            draft_ngrams(rows_B, bounds_B1, tokens_T, positions_T, self.text_NC, self.made_NK)
        return inputs

    def inputs_of(self, staged: Staged) -> Inputs:
        """Views of the buffers that will contain the inputs of this step."""
        tokens, sequences = len(staged.decided.tokens_T), len(staged.decided.rows_B)
        room = self.inputs
        return Inputs(
            room.tokens_T[:tokens],
            room.positions_T[:tokens],
            room.slots_GT[:, :tokens],
            room.lengths_B[:sequences],
            room.tables_GBP[:, :sequences],
        )


def _write(
    words: np.ndarray, chunks: Sequence[Chunk], layout: Layout, shared: int, groups: int, axes: bool
) -> int:
    """All parts of a step one behind the other, in the order of `Layout.sizes`; how many words that is."""
    known_tokens = tokens_with_drafts if layout.verifies else tokens_of
    tokens = [token for chunk in chunks for token in known_tokens(chunk)]
    padding = layout.padding(len(chunks), len(tokens))
    blank = [0] * len(padding)
    rows = [chunk.request.row for chunk in chunks] + [PADDING_ROW] * len(padding)
    starts = [chunk.start for chunk in chunks]
    sample_bounds: Sequence[int] | np.ndarray = NO_BOUNDS
    if layout.one_each and layout.samples == layout.sequences:  # every row decodes a token
        bounds = np.arange(layout.sequences + 1)
        sample_at, sample_rows = [*range(len(chunks)), *blank], rows
    else:
        bounds = np.cumsum([0, *(chunk.count for chunk in chunks), *padding])
        sample_at, sample_rows = _samples(bounds, rows, [chunk.samples for chunk in chunks], layout)
    if layout.verifies:
        sample_bounds = np.cumsum([0, *(chunk.samples for chunk in chunks), *blank])
        starts = [LENGTH_ON_DEVICE if chunk.ahead else chunk.start for chunk in chunks]
    pages = [page for chunk in chunks for page in chunk.pages]
    parts: tuple[Sequence[int] | np.ndarray, ...] = (
        rows,
        starts + blank,
        bounds,
        [chunk.first_page for chunk in chunks] + blank,
        np.cumsum([0, *(len(chunk.pages) // groups for chunk in chunks), *blank]),
        pages + [0] * (groups * layout.pages - len(pages)),
        tokens + [0] * (layout.tokens - len(tokens)),
        sample_at,
        sample_rows,
        [shared],
        sample_bounds,
        axes_offsets(chunks, layout.tokens).ravel() if axes else NO_BOUNDS,
    )
    start = 0
    for part, size in zip(parts, layout.sizes(groups, axes), strict=True):
        if size:
            words[start : start + size] = part
            start += aligned(size)
    return start


def _samples(
    bounds: np.ndarray, rows: Sequence[int], counts: Sequence[int], layout: Layout
) -> tuple[np.ndarray, np.ndarray]:
    """Indices and rows of the tokens with sampled successors: the last `counts` of each sequence."""
    at_S, rows_S = np.zeros(layout.samples, int), np.full(layout.samples, PADDING_ROW)
    counts_B = np.array(counts, int)
    ends_B = np.cumsum(counts_B)
    total = int(ends_B[-1]) if len(ends_B) else 0
    to_token_B = bounds[1 : len(counts) + 1] - ends_B
    at_S[:total] = np.arange(total) + np.repeat(to_token_B, counts_B)
    rows_S[:total] = np.repeat(rows[: len(counts)], counts_B)
    return at_S, rows_S


def tokens_with_drafts(chunk: Chunk) -> list[int]:
    """`tokens_of`, where drafts follow the chunk's last token, or are in flight before it."""
    if not chunk.drafts and not chunk.ahead:
        return tokens_of(chunk)
    request = chunk.request
    if chunk.ahead or chunk.start >= request.known:
        return [SAMPLED_LAST, *chunk.drafts]
    return [request.outputs[-1], *chunk.drafts]


def tokens_of(chunk: Chunk) -> list[int]:
    """The chunk's tokens as far as the host knows them; SAMPLED_LAST for one that is still in flight."""
    request, start, count = chunk.request, chunk.start, chunk.count
    prompt = len(request.prompt)
    if start >= prompt:
        tokens = request.outputs[start - prompt : start - prompt + count]
    else:
        tokens = request.prompt[start : start + count]
        if request.pieces:
            tokens = words_of_pieces(request, start, tokens)
        if start + count > prompt:
            tokens = tokens + request.outputs[: start + count - prompt]
    return tokens if len(tokens) == count else [*tokens, SAMPLED_LAST]
